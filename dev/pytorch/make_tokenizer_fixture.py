"""make_tokenizer_fixture.py: writes texts with tiktoken's ids, for test_tokenizer.h to compare with.

    python make_tokenizer_fixture.py [--tokenizer FILE] [--out DIR]

Three tokenizers encode each text:
- Llama 3's own, from PyPI's llama-models (`pip install tiktoken llama-models`): its ids are in cases.txt, but the file
  itself may not be distributed here. The tests compare with these ids if LLAMA3_TOKENIZER names the file.
- one trained on these texts by tiktoken's own trainer, tokens.txt: always compared; shows that merges are right.
- `pairs`, in which any two bytes are a token: always compared; shows where a text was split.

A line of cases.txt: name, base64 of the text's bytes, two hashes, ids. The hashes (FNV-1a over little-endian int32) are
of tiktoken's ids with `pairs` and with tokens.txt; the ids are Llama 3's.
"""

import argparse
import base64
import hashlib
import os
import random
import struct
import sys
from pathlib import Path

LEARNED = 2_000  # tokens of tokens.txt
SIZE_LIMIT = 150_000  # bytes, both files together: they are committed
EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
# of the tokenizer.model of Llama 3, 3.1, 3.2 and 3.3
SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"

# Sentences written for this file, one per script or language.
SCRIPTS = {
    "english": "The shop at the corner sells bread, buttons and, on Fridays, unreliable advice. Nobody's complained; "
    "they'd rather queue.",
    "german": "Der Straßenkehrer zählt übrigens rückwärts, wenn Gäste über die große Brücke gehen – "
    "Donaudampfschifffahrtsgesellschaft.",
    "french": "L’été dernier, nous avons rangé le grenier : où étaient donc passés les œufs en bois, la clé rouillée "
    "et ce vieux garçon ?",
    "spanish": "¿Quién dejó la ventana abierta? ¡El pingüino ya está en la cocina y mañana vendrá su señor tío!",
    "polish": "Żółta łódka płynęła powoli, a gęś śmiała się z każdej ćmy. Źdźbło trawy drżało.",
    "turkish": "İstanbul'da ılık bir akşam: çaycı, ışığı kapatıp köşedeki ağacın altına oturdu. IĞDIR iğne ığ.",
    "vietnamese": "Buổi sáng mẹ tôi thường pha cà phê, rồi kể những chuyện cũ về chiếc xe đạp màu xanh.",
    "icelandic": "Það var þögult í fjörunni; ær og hænur sváfu undir bátnum.",
    "greek": "Ο ψαράς μέτρησε τα δίχτυα του δύο φορές και ξέχασε πόσα ήταν. Ἐν ἀρχῇ ἦν ὁ θόρυβος.",
    "russian": "Вчера соседский кот открыл холодильник, съел два сырника и сделал вид, что ёлка упала сама.",
    "ukrainian": "Їжак заґавився біля під'їзду: ґанок, яєчня, щось іще.",
    "serbian": "Љиљана њише ђачку торбу, а џеп јој је пун ћирилице.",
    "arabic": "في الصباح الباكر يفتح الخبّاز دكّانه، ثم يسأل القطط: أين المفتاح؟ الرقم ٣٤٥٦٧ على الباب.",
    "persian": "گربه‌ها می‌خواهند پنجره باز باشد؛ سال ۱۴۰۳ بود.",
    "urdu": "یہ راستہ کہاں جاتا ہے؟ شاید پرانے ٹیلے تک۔",
    "hebrew": "השכנה מהקומה השלישית מגדלת עגבניות על הגג, וגם שָׁלוֹם אחד קטן.",
    "yiddish": "דער שוסטער האָט פֿאַרלוירן זײַן לעפֿל.",
    "hindi": "कल शाम की बारिश में मेरा छाता उड़ गया, और दूधवाले ने हँसकर क्षमा माँगी। संख्या १२३४५ है।",
    "bengali": "নদীর ধারে একটি পুরোনো নৌকা বাঁধা আছে, তার নাম ৪২।",
    "punjabi": "ਸਾਡੇ ਪਿੰਡ ਦੀ ਬੱਸ ਹਮੇਸ਼ਾ ਦੇਰ ਨਾਲ ਆਉਂਦੀ ਹੈ।",
    "gujarati": "રસોડામાં ત્રણ ચમચી ખૂટે છે.",
    "tamil": "மழை நின்றதும் குழந்தைகள் காகிதக் கப்பல்களை மிதக்க விட்டார்கள்; ௧௨௩ கப்பல்கள்.",
    "telugu": "నిన్న రాత్రి చంద్రుడు మా పెరట్లో దిగాడు.",
    "kannada": "ಅಜ್ಜಿಯ ಕನ್ನಡಕ ಎಲ್ಲಿದೆ?",
    "malayalam": "മഴക്കാലത്ത് പൂച്ച വള്ളത്തിൽ ഉറങ്ങി.",
    "sinhala": "අද උදේ කිරි ඉවරයි.",
    "thai": "เมื่อวานนี้แมวของฉันนั่งมองฝนตกทั้งวันแล้วไม่ยอมกินข้าว เลขที่ ๑๒๓๔",
    "lao": "ແມ່ນ້ຳໄຫຼຊ້າໆ ໃນຕອນແລງ",
    "khmer": "ឆ្មាដេកលើដំបូល",
    "burmese": "မိုးရွာနေသည်။ ၁၂၃",
    "tibetan": "བྱི་ལ་ཉལ་བཞག ༡༢༣",
    "georgian": "მეზობლის კატა ფანჯარაში ზის და ღრუბლებს ითვლის.",
    "armenian": "Պապիկը մոռացել է ժամացույցը այգում։",
    "amharic": "ድመቷ ወንበሩ ላይ ተኛች። ፩፪፫",
    "cherokee": "ᏪᏌ ᎤᏂᏍᏆᎸᎡ",
    "inuktitut": "ᐳᓯ ᓯᓂᑦᑐᖅ",
    "mongolian": "ᠮᠣᠷᠢ ᠭᠦᠢᠪᠡ ᠠ᠎ᠡ",
    "chinese": "隔壁的老裁缝每天傍晚都把灯挂在门口，说是给迷路的风看的。第二天，风果然来了两次！",
    "traditional": "圖書館的貓不借書，卻認得每一位遲還的讀者。",
    "cantonese": "佢哋喺街市買咗兩斤菜心，仲要嘥唔少時間。",
    "rare_han": "㐀㐁㐂 𠀀𠀁𠂇 豈更車 龘靐齉爨",
    "japanese": "駅前のパン屋さんは、雨の日だけメロンパンを三つおまけしてくれる。ﾊﾝｶｸと「全角ＡＢＣ１２３」もある。",
    "korean": "할머니의 라디오는 언제나 세 시에 노래를 멈추고 숨을 쉰다. ㅋㅋㅋ 한글 자모",
    "gothic": "𐌲𐌿𐍄𐌹𐍃𐌺 𐌼𐌴𐌻𐌹",
    "cuneiform": "𒀀𒀁𒐕𒐖 𓀀𓀁𓎆",
    "deseret": "𐐔𐐯𐑅𐐨𐑉𐐯𐐻 𐐀",
    "adlam": "𞤀𞤣𞤤𞤢𞤥 𞥑𞥒𞥓",
}

# Letters and numbers assigned since Unicode 14, which older libraries treat as symbols: the ends of their ranges.
NEW_LETTERS = """
1c89 1c8a a7cb a7cd a7da a7dc 105c0 105f3 10d4a 10d65 10d6f 10d85 10ec2 10ec4 1123f 11240 11380 11389 1138b 1138e
11390 113b5 113b7 113d1 113d3 11bc0 11be0 11f02 11f04 11f10 11f12 11f33 1342f 13441 13446 13460 143fa 16100 1611d
16d40 16d6c 18cff 1b132 1b155 1df25 1df2a 1e030 1e06d 1e4d0 1e4eb 1e5d0 1e5ed 1e5f0 2b739 2ebf0 2ee5d 31350 323af"""
NEW_NUMBERS = """
10d40 10d49 116d0 116e3 11bf0 11bf9 11f50 11f59 16130 16139 16d70 16d79 1ccf0 1ccf9 1d2c0 1d2d3 1e4f0 1e4f9 1e5f1
1e5fa"""

EMOJI = {
    "faces": "😀😃 🙂🙃🫠 🥹 😶‍🌫️ ❤️ ❤ ☺️ ☺ ✂️",
    "families": "👨‍👩‍👧‍👦 👩🏽‍💻 🧑🏿‍🚀 👋🏻👋🏼👋🏽👋🏾👋🏿 🏳️‍🌈 🏴‍☠️ 🐻‍❄️",
    "flags": "🇯🇵🇧🇷 🇨🇭 🇺🇳🇺 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "keycaps": "1️⃣2️⃣ #️⃣ *️⃣ 🔟 ⓵ ①②③ ⅷ Ⅻ ½¾ ² x³ ㊿",
    "emoji_words": "ok👍done 🚀🚀🚀launch!!!😂😂 :-) ¯\\_(ツ)_/¯ (╯°□°)╯︵ ┻━┻",
}

SIGNS = {
    "mathematics": "∀ε>0 ∃δ>0: |x−a|<δ ⇒ |f(x)−f(a)|<ε;  ∑ᵢ₌₁ⁿ xᵢ² ≤ ∫₀^∞ e^{−t} dt ≈ 1 ± 0.5·10⁻³ √2 ∈ ℝ∖ℚ 𝔸𝕓𝐜𝒟 𝟙𝟚𝟛",
    "latex": "\\begin{align*}\n  \\frac{\\partial L}{\\partial w_{ij}} &= \\sum_{k=1}^{K} \\alpha_k x_{kj} \\\\\n"
    "\\end{align*}",
    "money": "$1,234.56 €99,95 £3 ¥500 ₹250 ₿0.001 ¢5 50% 7‰ №8 §9 ¶",
    "quotes": "“so” ‘so’ „so“ «so» ‹so› 「so」『so』 \"so\" 'so' `so` ``so''",
    "dashes": "a-b a‐b a‑b a–b a—b a―b a−b --- ___ === *** ... … ‥ ,,, ;;; !!! ??? ?! :::",
    "boxes": "┌──┬──┐\n│  │  │\n└──┴──┘ ░▒▓█ ▲▼◆ ←↑→↓ ⇐⇒ ★☆ ♠♥ ♪♫ ⠓⠑⠇⠇⠕",
    "combining": "e\u0301 e\u0301\u0323 a\u0308\u0304b o\u0302\u0301ng "
    "Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319a\u0324\u031e\u0349\u035a\u032f l\u20dd "
    "\u0301x \u0301 1\u0301",
    "normal_forms": "é é ﬁ fi Å Å Å ﷺ Ǆ ǅ ǆ ſtraße ẞ K K ℃ Ⅳ",
    "invisible": "a\u00adb a\u200bb a\u200cb a\u200db a\u2060b \ufeffc d\ufeff \u200e\u200f \u202ax\u202c \ufffc\ufffd "
    "\ufe0f \U000e0001",
    "private": "\ue000\uf8ff \U000f0000 \U00100000\U0010ffff \ufdd0 \uffff \U0001ffff",
    "urls": "https://example.org/a%20b?q=1&r=x+y#top mailto:me@example.org C:\\Temp\\new /usr/bin/../lib 192.168.0.1 "
    "::1",
    "hashes": "3b5d5c3712955042212316173ccf37be 0xDEADBEEF deadBeef42 #ff00aa U+1F600 \\u00e9 &eacute; &#233; %C3%A9",
    "camel": "getHTTPResponseCode2XX snake_case_name kebab-case-name SCREAMING_SNAKE __init__ iPhone15Pro x86_64 "
    "CamelCaseWith1Digit",
}

CODE = {
    "c": "static inline int64_t min_i64(int64_t a, int64_t b)\n{\n\treturn a < b ? a : b; /* the less */\n}\n\n#define "
    "N (1u << 31)\n",
    "python": 'def walk(tree: dict[str, int] | None = None) -> list[str]:\n    """Names, deepest first."""\n    return '
    "[f\"{k!r:>10}\" for k, v in (tree or {}).items() if v != 0x1F]\n\n\nif __name__ == '__main__':\n    "
    "print(*walk(), sep='\\n')\n",
    "javascript": "const f = async ({ a, ...rest }) => { await g?.(a ?? `x${rest.n}`); /* eslint-disable */ return !!a "
    "&& a !== '\\u00e9'; };\r\n",
    "rust": "impl<'a, T: Clone + 'a> Iterator for Walk<'a, T> {\n    type Item = &'a T;\n    fn next(&mut self) -> "
    "Option<Self::Item> { self.0.get(self.1..)?.first() }\n}\n",
    "haskell": "foldMap' f = foldl' (\\acc x -> acc <> f x) mempty\n  where x' = y''\n",
    "html": "<!DOCTYPE html>\n<ul class=\"menu\">\n  <li><a href='#s'>It&rsquo;s</a></li>\n</ul>\n<!-- it'll do -->\n",
    "json": '{"id": 12345678, "tags": ["a", "b"], "ok": true, "x": -1.5e-07, "n": null}\n',
    "sql": "SELECT d.name, COUNT(*) AS n FROM days d LEFT JOIN rain r ON r.day_id = d.id WHERE r.mm >= 2.5 GROUP BY 1 "
    "ORDER BY n DESC;\n",
    "shell": 'for f in "$@"; do [ -f "$f" ] && sed -e \'s/^[[:space:]]*//\' "$f" | awk \'{print $1"\\t"$2}\' '
    '>>"${out:-/dev/null}" 2>&1; done\n',
    "makefile": "all: $(OBJ)\n\t$(CC) -o $@ $^ $(LIBS)\n.PHONY: all\n",
    "lisp": "(define (twice f) (lambda (x) (f (f x)))) ; '(a b) `(c ,d)\n",
    "diff": "@@ -1,4 +1,4 @@\n-    old_line();\n+    new_line();\n \n",
}

# Tokens that no sequence of merges produces: found only because a whole piece is looked up first.
WHOLE = (
    "Việc này hợp nhiều điều. Každý všechno založ! Küçük bir gölge mümkün olsun, vardı. "
    "Даже глаза, например. Arthropoda しない .:.:.:.:.:.:.:.:"
)

ENDINGS = (
    "I'm you're he's she'd we've they'll don't I'M YOU'RE HE'S SHE'D WE'VE THEY'LL DON'T 'Re 'vE 'Ll 'lL it'S o'clock "
    "rock'n'roll "
    "'s 't 'sx 'rex x'dx 'l 'v 'r ''s 's's '\u017f '\u017fx \u2019s don\u2019t '\n's ' s 5's !'s _'ll \u00e9's '\u0455 "
    "'"
    "'s\u0301 "
    + " ".join(
        f"w'{e}{tail}"
        for e in "s S t T re Re rE RE ve Ve vE VE m M ll Ll lL LL d D \u017f".split()
        for tail in ("", "he", "a", "Abc")
    )
)

BLANKS = {
    "spaces": "".join(
        "x" + " " * n for n in (*range(1, 20), 31, 32, 33, 63, 64, 65, 80, 81, 82, 83, 84, 100, 127, 128, 129, 200)
    )
    + "x"
    + " " * 90,
    "tabs": "".join("x" + "\t" * n for n in range(1, 20)) + "\tx \t x\t \t ",
    "newlines": "".join("x" + "\n" * n for n in range(1, 20)) + " \n x\n \n\n  x\n   ",
    "windows": "a\r\nb\r\n\r\nc\r\n \r\n d\re\r\r\rf \r\r\n\n\r g\r\n\t\r\n",
    "indents": "if a:\n    b\n        c\n\td\n\t\te\n  \n\n    f;\n}  \n   }\n\n\n",
    "unicode": "a\u00a0b \u00a0c\u00a0 d\u2028e\u2029f \u2028 g\u0085h\u1680i\u2000j\u2003\u2003k\u200a "
    "l\u202fm\u205fn\u3000o\u3000\u3000p",
    "unicode_lines": "a\u00a0\nb \u2028\nc\u3000\r\n\u3000d\u2029\u2029\n\n\u0085e\u0085\nf\x0b\ng\x0c\n\x0b\x0ch",
    "no_blanks": "a\u180eb \u180e c\u180e\u180e \ufeffd\ufeff \ufeff\ufeff e\u200b\u200b f\u200b "
    "\u2800g\u3164h\x1c\x1d\x1e\x1fi",
    "each_before_a_word": "".join(
        f" {b}y\n{b}{b}z{b}.{b}\n"
        for b in "\t\x0b\x0c\x85\u00a0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\u180e\u200b\ufeff\x1c\x1f"
    ),
    "before_signs": "a  (b)  .c   !\n  ?  \n\n  , \t; \u00a0: \u00a0\u00a0- \n-\n\n--\r\n\r\n---\n \n",
    "at_the_end": "end   \t ",
    "only_space": " ",
    "only_spaces": "     ",
    "only_newline": "\n",
    "only_windows": "\r\n",
    "only_mixed": " \n \t\r\n  ",
}

NAMES = (
    "<|begin_of_text|>hello<|end_of_text|> <|eot_id|><|start_header_id|>user<|end_header_id|>\n\n<|python_tag|> "
    "<|eom_id|> "
    "<|finetune_right_pad_id|><|reserved_special_token_0|><|reserved_special_token_247|><|image|><|step_id|> "
    "<|endoftext|> <s></s> [INST] <|"
)

LONG = {
    "long_word": "antidis" + "establish" * 40 + "mentarianism",
    "one_letter": "a" * 700,
    "alternating": "ab" * 150 + "ba" * 151,
    "long_hex": "".join(f"{i * 2654435761 % 2**32:08x}" for i in range(60)),
    "long_signs": "-" * 300 + "=" * 129 + "*" * 77 + "~#" * 60,
    "long_han": "山水火木金土日月" * 40,
    "long_thai": "กขคงจฉชซ" * 20,
    "long_emoji": "🎉" * 64,
    "digits": " ".join("12345678901234567890"[:n] for n in range(1, 21)) + " 007 3.14159 1e10 1_000_000 0b1011",
    "digits_of_others": "٠١٢٣٤٥٦٧٨٩ ۰۱۲۳۴۵ ०१२३४५६७८९ ০১২৩ ๐๑๒๓๔๕๖ １２３４５６７ 𝟎𝟏𝟐𝟑𝟒 ²³¹⁴⁵ ₀₁₂₃ ⅓⅔⅛ ⅠⅡⅢⅣ 一二三四 〇 ⑩⑪ ௧௨௰",
}

CONTROLS = {
    "control_characters": "".join(chr(c) for c in range(32)) + "\x7f",
    "control_characters_apart": "".join(f"a{chr(c)} {chr(c)}1" for c in range(32)) + "\x7f b",
    "c1_controls": "".join(f"{chr(c)}x" for c in range(0x80, 0xA0)),
    "zeros": "\0\0\0a\0 b\0\n",
    "latin1": "".join(chr(c) for c in range(0xA0, 0x100)),
    "ascii": "".join(chr(c) for c in range(32, 127)),
}

REST = b" and then 12345 words don't split"

# Not UTF-8: from the first wrong byte on, tiktoken's _encode_bytes merges without splitting, including the last piece
# before it.
INVALID = {
    "all_bytes": bytes(range(256)),
    "all_bytes_backward": bytes(range(255, -1, -1)),
    "upper_half": bytes(range(128, 256)),
    "latin1_text": "Der Fluß trägt größere Schiffe, als man dächte.".encode("latin1"),
    "utf16": "Two bytes each, änd a mark".encode("utf-16"),
    "cut_2": "na\u00efve".encode()[:3],
    "cut_3_after_1": "5 \u20ac".encode()[:3],
    "cut_3_after_2": "5 \u20ac".encode()[:4],
    "cut_4_after_1": "ok \U0001f999".encode()[:4],
    "cut_4_after_2": "ok \U0001f999".encode()[:5],
    "cut_4_after_3": "ok \U0001f999".encode()[:6],
    "cut_alone": b"\xf0\x9f\xa6",
    "cut_han": "\u6c34\u706b".encode()[:5],
    "overlong_slash": b"a/b \xc0\xaf c" + REST,
    "overlong_3": b"x \xe0\x80\xaf y" + REST,
    "overlong_4": b"x \xf0\x80\x80\xaf" + REST,
    "overlong_nul": b"nul \xc0\x80" + REST,
    "overlong_e0_9f": b"\xe0\x9f\xbf" + REST,
    "least_e0_a0": b"\xe0\xa0\x80" + REST,
    "overlong_f0_8f": b"\xf0\x8f\xbf\xbf" + REST,
    "least_f0_90": b"\xf0\x90\x80\x80" + REST,
    "surrogate_low": b"a \xed\xa0\x80 b" + REST,
    "surrogate_high": b"a\xed\xbf\xbfb" + REST,
    "surrogate_pair": b"\xed\xa0\xbd\xed\xb8\x80" + REST,
    "before_surrogates": b"\xed\x9f\xbf" + REST,
    "beyond": b"top \xf4\x90\x80\x80" + REST,
    "highest": b"\xf4\x8f\xbf\xbf" + REST,
    "f5": b"a\xf5\x80\x80\x80" + REST,
    "fe_ff": b"\xfe\xff a" + REST,
    "five_bytes": b"\xf8\x88\x80\x80\x80" + REST,
    "c1": b"\xc1\xbf" + REST,
    "c2": b"\xc2\x80" + REST,
    "broken_2nd": b"\xe4\x41\x80" + REST,
    "broken_3rd": b"\xe4\xb8\x41" + REST,
    "broken_4th": b"\xf0\x9f\xa6\x41" + REST,
    "broken_3rd_of_4": b"\xf0\x9f\xc0\x80" + REST,
    "broken_by_lead": b"\xf0\x9f\xa6\xc0" + REST,
    "continuation_alone": b"abc \x80 def",
    "continuations": b"word\x80\x81\x82\xbf\xbf word",
    "lead_before_ascii": b"caf\xc3 au lait",
    "lead_before_lead": b"\xe4\xe4\xb8\xad ok",
    "blanks_before": b"end of line \n\n  \t \xff and the rest 123456 don't",
    "newlines_before": b"a\n\n\n\xff",
    "spaces_before": b"a     \xffb",
    "line_before": b"a\n  \xff",
    "line_and_tab_before": b"a\n\t\xff",
    "return_before": b"a\r\n  \xff",
    "tab_before": b"a\t \n   \xff",
    "formfeed_before": b"a\x0c\n  \xff",
    "windows_before": b"a \r\n\r\n\xff x",
    "nbsp_before": "a \u00a0\u00a0".encode() + b"\xff x",
    "word_before": b"several words before\xff",
    "digits_before": b"123456\xff789",
    "signs_before": b"really?!\n\n\xe2\x82 no",
    "wrong_at_once": b"\xff then some ordinary text, with 1234567 digits",
    "good_after": b"bad \xff then good: " + "\u00e9t\u00e9 \u6c34 \U0001f999".encode(),
    "long_after": b"x \xff" + b"the quick and the slow " * 20,
    "byte_long": b"\xff" * 300,
    "c3_long": b"\xc3" * 130 + b"\xa9",
}


def cases():
    """(name, bytes) of every case."""
    out = {"empty": b""}
    for group in (SCRIPTS, EMOJI, SIGNS, CODE, BLANKS, LONG, CONTROLS):
        out |= {name: text.encode() for name, text in group.items()}
    new_letters, new_numbers = ("".join(chr(int(c, 16)) for c in ends.split()) for ends in (NEW_LETTERS, NEW_NUMBERS))
    out |= {
        "new_letters": b"x" + new_letters.encode(),
        "new_numbers": new_numbers.encode(),
        "whole": WHOLE.encode(),
        "endings": ENDINGS.encode(),
        "special_names": NAMES.encode(),
    }
    out["all_scripts"] = " ".join(text[:12] for text in SCRIPTS.values()).encode()
    out |= INVALID | {f"byte_{i:02x}": bytes([i]) for i in range(256)}
    rng = random.Random(1)  # valid and invalid text in every mixture
    parts = [text.encode() for group in (SCRIPTS, EMOJI, CODE, BLANKS) for text in group.values()]
    for i in range(36):
        mixed = b"".join(p[(at := rng.randrange(len(p))) : at + rng.randrange(1, 8)] for p in rng.choices(parts, k=5))
        out[f"mixed_{i}"] = mixed if i % 2 else mixed.decode(errors="ignore").encode()
    return out


def load(path):
    """{bytes: rank} of a tokenizer.model."""
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in Path(path).read_bytes().splitlines())
    }


def encoding(ranks):
    import tiktoken

    return tiktoken.Encoding("llama3", pat_str=EXPRESSION, mergeable_ranks=ranks, special_tokens={})


def pairs():
    """A tokenizer whose ids show where pieces end: every byte, and every two bytes, are a token."""
    return {bytes([i]): i for i in range(256)} | {
        bytes([i, j]): 256 + 256 * i + j for i in range(256) for j in range(256)
    }


def learn(text):
    """{bytes: rank}, trained on a text by tiktoken's trainer."""
    from tiktoken._educational import bpe_train

    return bpe_train(text, LEARNED, EXPRESSION, visualise=None)


def fnv1a(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


def find_tokenizer(path):
    """The given path, or $LLAMA3_TOKENIZER, or the file in the package llama-models."""
    if path or os.environ.get("LLAMA3_TOKENIZER"):
        return Path(path or os.environ["LLAMA3_TOKENIZER"])
    try:
        import llama_models.llama3
    except ImportError:
        sys.exit(
            "error: no tokenizer: neither --tokenizer nor LLAMA3_TOKENIZER is given and llama-models is not installed; "
            "pip install llama-models"
        )
    return Path(llama_models.llama3.__file__).parent / "tokenizer.model"


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument(
        "--tokenizer", help="Llama 3's tokenizer.model; default: $LLAMA3_TOKENIZER, else the one in llama-models"
    )
    args.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "test" / "fixtures" / "tokenizer"
    )
    args = args.parse_args()
    path = find_tokenizer(args.tokenizer)
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        sys.exit(
            f"error: {path} is not Llama 3's tokenizer.model, expected SHA-256 {SHA256[:16]}...; pip install "
            f"llama-models"
        )
    ranks = load(path)
    real = encoding(ranks)
    ids = {name: real._encode_bytes(text) for name, text in cases().items()}
    if any(real.decode_bytes(ids[name]) != text for name, text in cases().items()):
        sys.exit("error: tiktoken does not give back a text; nothing written")

    learned = learn(b" ".join(text for text in cases().values()).decode(errors="ignore"))
    tokens = b"".join(
        b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in sorted(learned.items(), key=lambda t: t[1])
    )
    split, merged, lines = encoding(pairs()), encoding(learned), b""
    for name, text in cases().items():
        hashes = [
            fnv1a(struct.pack(f"<{len(seen)}i", *seen))
            for seen in (split._encode_bytes(text), merged._encode_bytes(text))
        ]
        lines += b"%s %s %016x %016x %s\n" % (
            name.encode(),
            base64.b64encode(text),
            *hashes,
            b" ".join(b"%d" % i for i in ids[name]),
        )
    print(
        f"{len(ids)} texts, {sum(map(len, cases().values())):,d} bytes, {sum(map(len, ids.values())):,d} ids of Llama "
        f"3; "
        f"tokens.txt {len(tokens):,d} and cases.txt {len(lines):,d} bytes"
    )
    if len(tokens) + len(lines) > SIZE_LIMIT:
        sys.exit(
            f"error: {len(tokens) + len(lines):,d} bytes are over the limit of {SIZE_LIMIT:,d}: shorten texts; nothing "
            f"written"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tokens.txt").write_bytes(tokens)
    (args.out / "cases.txt").write_bytes(lines)


if __name__ == "__main__":
    main()
