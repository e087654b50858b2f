#!/usr/bin/env python3
"""references.py [PROGRAM | --possible]: files of other programs, read by these programs and by those.

transformers, PEFT, lm-evaluation-harness and gguf read small models, adapters, tokenizers and templates of the kinds
that public bug reports are about, and the programs must give their numbers and ids, or a refusal that names the cause.
PROGRAM is train_llama3; eval_llama3, generate_llama3 and convert_llama3 are those next to it.
--possible: exit code 0 if these packages are installed. The chat templates of Llama 3.1 to 3.3 are taken from the
package ldp, and from the directory TEMPLATES if it is set (files *.jinja); without them they are left out.
"""

import importlib.util
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = "torch transformers safetensors peft lm_eval gguf".split()
if sys.argv[1:] == ["--possible"]:
    sys.exit(any(importlib.util.find_spec(name) is None for name in PACKAGES))

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
TOP = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(TOP / "dev" / "test"), str(TOP / "dev" / "pytorch")]
import field_files  # noqa: E402
import gguf  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval_adapter import Llama3InC  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file, save_model  # noqa: E402

transformers.utils.logging.disable_progress_bar()
PROGRAM = Path(sys.argv[1] if len(sys.argv) > 1 else TOP / "build" / "cpu-fp32" / "train_llama3").resolve()
CONVERSATIONS = [PROGRAM.with_name("tokens_llama3"), "--conversations"]
LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
counts = {"pass": 0, "FAIL": 0}


def check(name, holds, what):
    word = "pass" if holds else "FAIL"
    counts[word] += 1
    print(f"{word} {name}: {str(what)[:300]}", flush=True)


def model(folder, specials=(), front=None, tokenizer_config=None, **config):
    """A model of field_files.py, as transformers writes it."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    if specials:
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (tokenizer_config or {})
        field_files.write_tokenizer(Path(folder), list(specials), front, json.dumps(tokenizer_config))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256 + len(specials), "max_position_embeddings": 512,
             "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(shape | config)))
    made.save_pretrained(folder)
    Path(folder, "generation_config.json").unlink(missing_ok=True)
    return made


IDS = [random.Random(i).randrange(256) for i in range(65)]


def run(name, *options):
    """Runs a program of the same build as PROGRAM."""
    program = PROGRAM.with_name(name + ("_cuda" if PROGRAM.name.endswith("_cuda") else ""))
    return subprocess.run([program, *map(str, options), "--threads", "1"], capture_output=True, text=True)


def our_loss(*options):
    Path("w.tok").write_bytes(struct.pack("<8sIIIIQ32x65H", b"LLM3TOK1", 1, 2, 256, 0, 65, *IDS))
    done = run("eval_llama3", *options, "--eval", "w.tok", "--seq", 64)
    return json.loads(done.stdout)["loss"] if done.returncode == 0 else done.stderr.strip()


def loss_of(made):
    with torch.no_grad():
        logits = made(torch.tensor([IDS[:-1]])).logits[0]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(IDS[1:])).item()


def same_loss(name, folder, *options):
    theirs, ours = loss_of(transformers.LlamaForCausalLM.from_pretrained(folder)), our_loss("--model", folder, *options)
    check(name, isinstance(ours, float) and abs(ours / theirs - 1) < 1e-6, f"{ours}, transformers {theirs:.8f}")


# ---------------------------------------------------------------- the harness
def harness():
    bos = {"bos_token": LLAMA3[0], "eos_token": LLAMA3[1]}
    model("bos", LLAMA3, LLAMA3[0], bos)
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    model("chatml", chatml, None, {"bos_token": chatml[0], "eos_token": chatml[2], "chat_template": CHATML})
    for folder in "bos", "chatml":
        ours = Llama3InC(model=folder, program=PROGRAM, options="--threads 1")
        theirs = HFLM(pretrained=folder, device="cpu", dtype="float32")
        for text in "a b", "", LLAMA3[0] + "a", "caf\u00e9\u00a0":
            check(f"{folder}: ids of {text!r}", ours.tok_encode(text) == theirs.tok_encode(text), ours.tok_encode(text))
        pairs = [("a b", " c"), ("", " c"), ("is\u00a0", "b"), ("\u306f\u3000", "\u6771"), ("x " * 400, "y")]
        asked = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        answers = [m.loglikelihood(asked, disable_tqdm=True) for m in (ours, theirs)]
        for pair, (a, b) in zip(pairs, zip(*answers)):
            what = f"{a[0]} and {b[0]}"
            check(f"{folder}: log-probability of {pair!r:.40}", abs(a[0] / b[0] - 1) < 1e-5 and a[1] == b[1], what)
        asked = [Instance("loglikelihood_rolling", {}, ("a rolling text " * 60,), 0)]
        a, b = (m.loglikelihood_rolling(asked, disable_tqdm=True)[0] for m in (ours, theirs))
        check(f"{folder}: rolling log-probability", abs(a / b - 1) < 1e-5, f"{a} and {b}")
        generation(folder, ours, theirs)


def generation(folder, ours, theirs):
    greedy = {"until": [], "max_gen_toks": 5, "do_sample": False}
    talk = theirs.apply_chat_template([{"role": "user", "content": "a"}]) if folder == "chatml" else "a"
    cases = {
        "a prompt": ("a b", greedy),
        "a chat template's text": (talk, greedy),
        "140,000 bytes": ("a b " * 35000, greedy | {"max_gen_toks": 1}),
        "until is a text": ("a b", greedy | {"until": "X~"}),
        "max_new_tokens": ("a b", {"until": [], "max_new_tokens": 5, "do_sample": False}),
        "a context that is too long": ("a b " * 150, greedy),
        "a NUL": ("a\0b", greedy),
        "top_k 1": ("a b", {"until": [], "max_gen_toks": 5, "do_sample": True, "temperature": 2.0, "top_k": 1}),
        "special tokens in the answer": ("a b", greedy | {"max_gen_toks": 110}),
    }
    for name, (context, options) in cases.items():
        asked = [Instance("generate_until", {}, (context, dict(options)), 0)]
        a, b = (m.generate_until(asked, disable_tqdm=True)[0] for m in (ours, theirs))
        check(f"{folder}: generates as hf: {name}", a == b, f"{a!a:.60} and {b!a:.60}")
    sampled = {"until": [], "max_gen_toks": 5, "temperature": 2.0}
    asked = [Instance("generate_until", {}, ("a b", dict(sampled)), 0) for _ in range(3)]
    texts = ours.generate_until(asked, disable_tqdm=True)
    check(f"{folder}: repeated requests are sampled anew", len(set(texts)) == 3, ascii(texts))
    try:
        ours.generate_until([Instance("generate_until", {}, ("a", greedy | {"num_beams": 4}), 0)])
        refused = "it answers"
    except SystemExit as end:
        refused = str(end)
    check(f"{folder}: another generation option is refused by name", "num_beams = 4" in refused, refused)


# ---------------------------------------------------------------- weights, RoPE, ids
def weights():
    made = model("tied", tie_word_embeddings=True)
    plain = load_file("tied/model.safetensors")
    embedding = plain["model.embed_tokens.weight"]
    same_loss("a tied model", "tied")
    save_file(plain | {"lm_head.weight": embedding.clone()}, "tied/model.safetensors", {"format": "pt"})
    same_loss("a tied model with an equal head", "tied")
    save_file(plain | {"lm_head.weight": 2 * embedding}, "tied/model.safetensors", {"format": "pt"})
    ours = our_loss("--model", "tied")
    check("a tied model with another head is refused", "lm_head.weight" in str(ours), ours)
    save_model(made, "tied/model.safetensors")
    same_loss("save_model's file of a tied model", "tied")
    made.model.save_pretrained("inner")
    same_loss("LlamaModel's file", "inner")
    made = model("shards")
    os.remove("shards/model.safetensors")
    made.save_pretrained("shards", max_shard_size="60KB")
    same_loss("several files", "shards")
    double = {name: 2 * tensor for name, tensor in made.state_dict().items()}
    save_file(double, "shards/model.safetensors", {"format": "pt"})
    same_loss("model.safetensors beside an index of other files", "shards")


def rope():
    llama = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    short = llama | {"original_max_position_embeddings": 32}
    model("rope")
    config = json.loads(Path("rope/config.json").read_text())
    for key in "rope_parameters", "rope_scaling", "rope_theta":
        config.pop(key, None)
    for keys in (
        {"rope_theta": 500000.0},
        {"rope_scaling": short, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": short | {"rope_theta": 500000.0}},
        {"rope_parameters": {"rope_theta": 500000.0}},
        {"rope_theta": 500000.0, "rope_scaling": {}},
        {"rope_theta": 500000.0, "rope_scaling": short},
        {"rope_scaling": llama, "original_max_position_embeddings": 32},
        {"rope_scaling": {**short, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
        {"rope_scaling": llama},
    ):
        Path("rope/config.json").write_text(json.dumps(config | keys))
        same_loss(f"RoPE of {keys!r:.150}", "rope")


def ids():
    model("ids", eos_token_id=[5, 6, 7], bos_token_id=4, pad_token_id=8)
    run("convert_llama3", "--model", "ids", "--export", "exported")
    for folder in "ids", "exported":
        config = transformers.AutoConfig.from_pretrained(folder)
        generation_config = transformers.AutoModelForCausalLM.from_pretrained(folder).generation_config
        found = [(c.bos_token_id, c.eos_token_id, c.pad_token_id) for c in (config, generation_config)]
        check(f"{folder}: the ids of config.json", found == [(4, [5, 6, 7], 8)] * 2, found)
    for specials in ["<|endoftext|>"], ["<s>", "</s>", "<|endoftext|>"], ["<s>", "</s>"], LLAMA3:
        names = {"bos_token": specials[0], "eos_token": specials[min(1, len(specials) - 1)]}
        model("vocab", specials, specials[0], names)
        Path("vocab.gguf").unlink(missing_ok=True)
        run("convert_llama3", "--model", "vocab", "--export", "vocab.gguf")
        fields = gguf.GGUFReader("vocab.gguf").fields
        vocab = gguf.SpecialVocab("vocab", load_merges=False)
        found = fields["tokenizer.ggml.bos_token_id"].contents(), fields["tokenizer.ggml.add_bos_token"].contents()
        theirs = vocab.special_token_ids["bos"], vocab.add_special_token["bos"]
        check(f"GGUF: bos of {specials}", found == theirs, f"{found} and {theirs}")


# ---------------------------------------------------------------- adapters
def adapters():
    made = model("base")
    theirs = loss_of(made)
    for init in True, "gaussian", "orthogonal", "pissa", "olora":
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=init)
        adapted = get_peft_model(transformers.LlamaForCausalLM.from_pretrained("base"), config)
        adapted.save_pretrained("adapters")
        ours = our_loss("--model", "base", "--adapters", "adapters")
        if init in ("pissa", "olora"):
            check(f"PEFT: {init} is refused by name", f'"init_lora_weights" is "{init}"' in str(ours), ours)
        else:
            check(f"PEFT: {init}", isinstance(ours, float) and abs(ours / theirs - 1) < 1e-6, f"{ours} and {theirs}")


# ---------------------------------------------------------------- chat templates
TALKS = [
    [("user", "Hi"), ("assistant", "Yo.")],
    [("system", " Be brief.\n"), ("user", "a\n\nb"), ("assistant", "c")],
    [("user", "a"), ("assistant", "b"), ("system", "now long"), ("user", " c "), ("assistant", "d")],
]


def same_ids(name, folder, end):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for i, talk in enumerate(TALKS):
        messages = [{"role": role, "content": content} for role, content in talk]
        Path("talk.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        Path("talk.tok").unlink(missing_ok=True)
        command = [*CONVERSATIONS, "--tokenizer", f"{folder}/tokenizer.json", "--out-train", "talk.tok", "talk.jsonl"]
        done = subprocess.run(command, capture_output=True, text=True)
        theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        ours = done.stderr
        if done.returncode == 0:
            data = Path("talk.tok").read_bytes()
            count = struct.unpack_from("<Q", data, 24)[0]
            ours = list(struct.unpack_from(f"<{count}H", data, 192))
        check(f"{name}, conversation {i + 1}", ours == [*theirs, end], f"{str(ours)[:80]} and {str(theirs)[:80]}")


def templates():
    names = {"bos_token": LLAMA3[0], "eos_token": LLAMA3[4]}
    files = sorted(Path(os.environ["TEMPLATES"]).glob("*.jinja")) if "TEMPLATES" in os.environ else []
    package = importlib.util.find_spec("ldp")
    if package:
        files += [Path(package.origin).parent / "nn" / "chat_templates" / "llama3.1_chat_template_hf.jinja"]
    for file in files:
        model("talk", LLAMA3, LLAMA3[0], names | {"chat_template": file.read_text()})
        same_ids(f"the template {file.stem}", "talk", 257)
    if not files:
        print("neither the package ldp nor TEMPLATES is there: Llama 3.1's to 3.3's templates are left out")
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for name, text in (
        ("ChatML", CHATML),
        ("ChatML and a line end", CHATML + "\n"),
        ("ChatML and a line end of Windows", CHATML + "\r\n"),
        ("ChatML and two line ends", CHATML + "\n\n"),
        ("ChatML with a line end after each block", CHATML.replace("%}", "%}\n")),
        ("ChatML with minus signs", CHATML.replace("{% endfor", "  {%- endfor").replace("{% if", "\n\n {%- if")),
        ("ChatML indented", CHATML.replace("{% endfor", "\n   {% endfor")),
    ):
        model("talk", chatml, None, {"eos_token": chatml[2], "chat_template": text})
        if name == "ChatML indented":  # the line end before the block stays: another template
            command = [*CONVERSATIONS, "--tokenizer", "talk/tokenizer.json", "--out-train", "no.tok", "talk.jsonl"]
            done = subprocess.run(command, capture_output=True, text=True)
            check(f"{name} is another template", "cannot render" in done.stderr, done.stderr)
        else:
            same_ids(name, "talk", 256)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for section in harness, weights, rope, ids, adapters, templates:
            section()
        os.chdir(TOP)
    print(f"{counts['pass']} passed, {counts['FAIL']} failed")
    sys.exit(counts["FAIL"] > 0)


if __name__ == "__main__":
    main()
