#!/usr/bin/env bash
# sample_text.sh DIR: writes 24 text files of 8 to 48 KB into DIR, 650 KB in all. The tests train on them.
# The words are invented and drawn by a random generator with a fixed seed, so every machine writes the same bytes and
# no
# change of the repository changes what the tests train on. Later words depend on earlier ones, so the loss can fall.
set -euo pipefail
[ $# -eq 1 ] || { echo "error: sample_text.sh was given $# arguments; expected one, the directory to write to" >&2; \
    exit 1; }
mkdir -p "$1"
LC_ALL=C awk -v dir="$1" '
function draw(n) { # a number from 0 to n - 1: the minimal standard generator of Park and Miller, exact in doubles
    state = (state * 16807) % 2147483647
    return int(state / 2147483647 * n)
}
function invented_word(    word, i, syllables) {
    syllables = 1 + draw(3)
    for (i = 0; i < syllables; i++) word = word onset[draw(onsets)] vowel[draw(vowels)] coda[draw(codas)]
    return word
}
function sentence(    text, length_in_words, i, w) {
    length_in_words = 4 + draw(12)
    w = draw(words)
    text = toupper(substr(word[w], 1, 1)) substr(word[w], 2)
    for (i = 1; i < length_in_words; i++) {
        w = draw(4) ? (w * 7 + draw(5)) % words : draw(words) # mostly one of five successors of the last word
        text = text (draw(12) ? " " : ", ") (draw(40) ? word[w] : draw(2000))
    }
    return text (draw(8) ? "." : draw(2) ? "?" : "!")
}
BEGIN {
    state = 20250621
    onsets = split("b br c ch d f g gr h l m n p r s st t tr v w", part, " ")
    for (i = 1; i <= onsets; i++) onset[i - 1] = part[i]
    vowels = split("a e i o u ea ou \303\251", part, " ")
    for (i = 1; i <= vowels; i++) vowel[i - 1] = part[i]
    codas = split(" |n|r|s|t|l|nd|ck", part, "|")
    for (i = 1; i <= codas; i++) coda[i - 1] = part[i] == " " ? "" : part[i]
    words = 800
    for (i = 0; i < words; i++) word[i] = invented_word()
    for (file = 0; file < 24; file++) {
        path = sprintf("%s/%02d.txt", dir, file)
        bytes = 8000 + draw(40000)
        for (written = 0; written < bytes; written += length(line) + 1) {
            line = draw(6) ? sentence() : "    " sentence() " " sentence()
            if (!draw(10)) line = line "\n"
            print line > path
        }
        close(path)
    }
}'
