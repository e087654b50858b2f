"""lm_eval_adapter.py: lets lm-evaluation-harness evaluate a model with this program.

    make
    python dev/pytorch/lm_eval_adapter.py run --model llama3_c --model_args model=out/a/model,ranks=2 --tasks hellaswag

Needs lm-eval and transformers. After `run` come the harness's own options. In --model_args, `model` is a directory that
--model of train_llama3 takes, with a tokenizer that transformers reads; `ranks` is the number of ranks (1), `program`
the program (./train_llama3), `options` more of its options, separated by spaces. Log-probabilities come from --score,
and generated texts from --generate.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

TOP = Path(__file__).resolve().parent.parent.parent


def run(command):
    """What a command prints; its own error message ends this program."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode(errors="replace")


@register_model("llama3_c")
class Llama3InC(TemplateLM):
    backend = "causal"

    def __init__(
        self, model, ranks=1, program=None, options="", max_length=None, batch_size=None, device=None, **unused
    ):
        super().__init__()
        if unused:
            sys.exit(f"--model_args {', '.join(unused)}: expected model, ranks, program, options and max_length")
        self.command = [program or TOP / "train_llama3", "--model", model, "--ranks", str(ranks), *options.split()]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        config = json.loads((Path(model) / "config.json").read_text())
        self.max_length = int(max_length or config["max_position_embeddings"])

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self):
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self):
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        if not requests:
            return []
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for _, context, continuation in requests:
                file.write(json.dumps({"context_ids": context, "continuation_ids": continuation}) + "\n")
            file.flush()
            lines = run([*self.command, "--score", file.name, *self.sequence(requests)]).splitlines()
        answers = [json.loads(line) for line in lines]
        answers = [(answer["logprob"], answer["greedy"]) for answer in answers]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def sequence(self, requests):
        """--seq, if a request is longer than the model's context: the program then cuts contexts on the left."""
        longest = max(len(context) + len(continuation) - 1 for _, context, continuation in requests)
        return ["--seq", str(self.max_length)] if longest > self.max_length else []

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        windows, counts = [], []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            pairs = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            pairs = [make_disjoint_window(pair) for pair in pairs]
            windows += [(None, context, continuation) for context, continuation in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests, disable_tqdm=False):
        answers = []
        for request in requests:
            context, options = request.args
            new = int(options.get("max_gen_toks", 256))
            temperature = float(options.get("temperature", 0)) if options.get("do_sample") else 0
            text = run(
                [*self.command, "--generate", context, "--max-tokens", new, "--temperature", temperature]
            ).removesuffix("\n")
            text = text.removeprefix(context)
            for stop in options.get("until", []):
                text = text.split(stop)[0]
            answers.append(text)
        return answers


if __name__ == "__main__":
    cli_evaluate()
