"""compare_gguf.py: GGUF files of the program in the gguf package, in transformers and in llama.cpp.

    make PRECISION=fp32 all build/cpu-fp32/logits
    python dev/pytorch/compare_gguf.py MODEL TEXT [--out dev/results/gguf.md]

MODEL is a Hugging Face directory with weights and a tokenizer, TEXT a text file. convert_llama3 (fp32 build, 2 ranks)
exports MODEL in each dtype. The gguf package reads every field and quantizes the same tensors itself; transformers
loads the files, and must give the program's logits, loss and greedy texts; llama.cpp, if the package xllamacpp is
installed, must continue the same prompts with the same text. Ends with an error if a bound is missed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy
import torch
from compare_smollm2 import BUILD, PROMPTS, Report, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
T, WINDOWS, NEW, NUM_PROMPTS = 256, 16, 40, 20
LOGIT_BOUND, LOSS_BOUND = 1e-4, 0.005


def export(model, path, dtype):
    run(BUILD / "convert_llama3", "--model", model, "--export", path, "--dtype", dtype, "--ranks", 2, "--threads", 1)


def interleave(matrix, heads):
    """The rows of wq or wk in ggml's order, as llama.cpp's converter computes it."""
    rows, cols = matrix.shape
    return matrix.reshape(heads, 2, rows // heads // 2, cols).swapaxes(1, 2).reshape(rows, cols)


def compare_fields(report, reader, config, tokenizer):
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.vocab_size": config["vocab_size"],
    }
    wrong = [name for name, value in expected.items() if fields.get(name) != value]
    report.add("fields of the configuration that differ", ", ".join(wrong) or "none", "none", not wrong)
    tokens = fields["tokenizer.ggml.tokens"]
    theirs = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    report.add(
        f"tokens of {len(tokens)} that differ from AutoTokenizer's",
        sum(a != b for a, b in zip(tokens, theirs, strict=False)),
        0,
        tokens[: len(theirs)] == theirs,
    )
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    merges = [" ".join(m) if isinstance(m, list) else m for m in merges]
    report.add(
        "merges equal those of tokenizer.json", len(merges), len(merges), fields["tokenizer.ggml.merges"] == merges
    )
    report.add(
        "the chat template is tokenizer_config.json's",
        fields.get("tokenizer.chat_template") == tokenizer.chat_template,
        True,
        fields.get("tokenizer.chat_template") == tokenizer.chat_template,
    )


def compare_tensors(report, reader, dtype, weights, config, name_map):
    """Every tensor as the gguf package converts the model's own weights."""
    kind = gguf.GGMLQuantizationType[DTYPES[dtype]]
    equal = 0
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":  # not a weight of the model
            continue
        weight = weights[name_map[tensor.name]].float().numpy()
        if "attn_q." in tensor.name or "attn_k." in tensor.name:
            key = "num_attention_heads" if "attn_q." in tensor.name else "num_key_value_heads"
            weight = interleave(weight, config[key])
        want = gguf.quants.quantize(weight, kind if weight.ndim == 2 else gguf.GGMLQuantizationType.F32)
        equal += want.tobytes() == tensor.data.tobytes()
    report.add(
        f"{dtype}: tensors with the bytes that the gguf package makes of the weights",
        f"{equal} of {len(weights)}",
        len(weights),
        equal == len(weights),
    )


def compare_logits(report, model, theirs, inputs, scratch):
    (scratch / "ids").write_bytes(inputs.numpy().astype("<i4").tobytes())
    with torch.no_grad():
        expected = torch.cat([theirs(window[None]).logits for window in inputs]).numpy()
    ours = numpy.frombuffer(run(BUILD / "logits", model, scratch / "ids", T), dtype="<f4").reshape(expected.shape)
    worst = numpy.abs(ours - expected).max()
    report.add(
        f"fp32: largest difference of a logit on {inputs.numel()} tokens, of up to {numpy.abs(expected).max():.0f}",
        f"{worst:.1e}",
        f"<= {LOGIT_BOUND:.0e}",
        worst <= LOGIT_BOUND,
    )


def loss_of(model, ids):
    sums = 0.0
    with torch.no_grad():
        for window in ids[: WINDOWS * T].reshape(WINDOWS, T):
            logits = model(window[None]).logits[0, :-1].double()
            sums += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return sums / (WINDOWS * (T - 1))


def our_texts(model, prompts):
    texts = []
    for prompt in prompts:
        command = [BUILD / "generate_llama3", "--model", model, "--prompt", prompt, "--max-tokens", NEW]
        texts.append(run(*command, "--temperature", 0).decode(errors="replace")[len(prompt) : -1])
    return texts


def transformers_texts(model, tokenizer, prompts, ends):
    texts = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=ends,
                pad_token_id=ends[0],
            )[0].tolist()
        new = [i for i in made[ids.shape[1] :] if i not in ends]
        texts.append(tokenizer.decode(new, clean_up_tokenization_spaces=False))
    return texts


def llama_cpp_texts(path, prompts):
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 1024, 1, False
    parameters.cpuparams.n_threads = 2
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(parameters)
    texts = []
    for prompt in prompts:
        request = {"prompt": prompt, "temperature": 0, "max_tokens": NEW, "cache_prompt": False}
        texts.append(server.handle_completions(request)["choices"][0]["text"])
    return texts


def report_texts(report, name, ours, theirs):
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(ours, theirs, strict=True):
        if a != b:
            print(f"{name}: {a!r}, expected {b!r}")
    report.add(f"greedy texts of {name} equal to the program's", f"{same} of {len(ours)}", len(ours), ours == theirs)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("model", type=Path)
    args.add_argument("text", type=Path)
    args.add_argument("--out", type=Path, help="write the table to this file")
    options = args.parse_args()
    logging.set_verbosity_error()
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        files = {dtype: scratch / f"model-{dtype}.gguf" for dtype in DTYPES}
        for dtype, path in files.items():
            export(options.model, path, dtype)
        run(BUILD / "convert_llama3", "--model", options.model, "--export", scratch / "directory", "--threads", 1)
        config = json.loads((scratch / "directory" / "config.json").read_text())
        tokenizer = AutoTokenizer.from_pretrained(scratch / "directory")
        weights = load_file(scratch / "directory" / "model.safetensors")
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        name_map = {names.get_name(name, try_suffixes=(".weight",)): name for name in weights}
        compare_fields(report, gguf.GGUFReader(files["fp32"]), config, tokenizer)
        for dtype, path in files.items():
            compare_tensors(report, gguf.GGUFReader(path), dtype, weights, config, name_map)
        text = options.text.read_text()
        ids = torch.tensor(tokenizer(text[:100000], add_special_tokens=False)["input_ids"])
        lines = [line for line in text.splitlines() if 40 < len(line) < 200]
        prompts = PROMPTS + lines[:: len(lines) // (NUM_PROMPTS - len(PROMPTS))][: NUM_PROMPTS - len(PROMPTS)]
        ours = our_texts(options.model, prompts)
        losses = {}
        for dtype in ("fp32", "q8_0"):
            path = files[dtype]
            model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
            losses[dtype] = loss_of(model, ids)
            if dtype == "q8_0":
                continue
            compare_logits(report, options.model, model, ids[: 4 * T].reshape(4, T), scratch)
            ends = json.loads((scratch / "directory" / "generation_config.json").read_text())["eos_token_id"]
            ends = ends if isinstance(ends, list) else [ends]
            report_texts(report, "transformers", transformers_texts(model, tokenizer, prompts, ends), ours)
        cost = losses["q8_0"] - losses["fp32"]
        report.add(
            f"loss that q8_0 costs on {WINDOWS} x {T} tokens of {losses['fp32']:.4f}",
            f"{cost:.5f}",
            f"< {LOSS_BOUND}",
            cost < LOSS_BOUND,
        )
        try:
            import xllamacpp  # noqa: F401
        except ImportError:
            print("xllamacpp is not installed: llama.cpp is left out")
        else:
            report_texts(report, "llama.cpp, fp32", llama_cpp_texts(files["fp32"], prompts), ours)
    if options.out:
        commit = run("git", "rev-parse", "--short", "HEAD").decode().strip()
        with open(options.out, "w") as out:
            print("# GGUF files in other programs\n", file=out)
            print(f"`{' '.join(['python', *sys.argv])}`; commit {commit}; gguf, transformers, llama.cpp.\n", file=out)
            print("| what | measured | expected | met |\n|---|---|---|---|", file=out)
            for row in report.rows:
                print("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |", file=out)
    if report.wrong:
        sys.exit(f"error: {report.wrong} bounds were missed")


main()
