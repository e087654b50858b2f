"""lm_eval_adapter.py: lets lm-evaluation-harness evaluate a model with this program.

    make
    python dev/pytorch/lm_eval_adapter.py run --model llama3_c --model_args model=out/a/model,ranks=2 --tasks hellaswag

Needs lm-eval and transformers. After `run` come the harness's own options. Log-probabilities come from eval_llama3
--score, and generated texts from generate_llama3 --prompts, both of token ids: the harness gets the answers that its
own model type `hf` gives. In --model_args, `model` is a directory that --model takes, with a tokenizer that
transformers reads; `ranks` is the number of ranks (1), `options` more options for both programs, separated by spaces,
`program` a program in the same directory as both (./train_llama3). `max_length` limits a context and its continuation
(the model's positions), `add_bos_token` overrides the tokenizer's setting.
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
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

TOP = Path(__file__).resolve().parent.parent.parent
SAMPLING = ("top_p", "top_k")
# other keys of transformers' GenerationConfig that change a text, each with the value that has no effect
UNSUPPORTED = {"num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_p": None, "typical_p": 1.0,
               "min_new_tokens": None, "min_length": 0, "bad_words_ids": None, "suppress_tokens": None,
               "forced_bos_token_id": None, "forced_eos_token_id": None, "penalty_alpha": None, "epsilon_cutoff": 0.0,
               "eta_cutoff": 0.0, "encoder_no_repeat_ngram_size": 0, "sequence_bias": None,
               "guidance_scale": None, "exponential_decay_length_penalty": None, "begin_suppress_tokens": None,
               "stop_strings": None, "top_h": None}  # fmt: skip


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
        self, model, ranks=1, program=None, options="", max_length=None, add_bos_token=None, batch_size=None,
        device=None, **unused
    ):  # fmt: skip
        super().__init__()
        if unused:
            sys.exit(f"--model_args {', '.join(unused)}: expected model, ranks, program, options, max_length and "
                     "add_bos_token")
        self.program = Path(program or TOP / "train_llama3")
        self.options = ["--model", model, "--ranks", str(ranks), *options.split()]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        config = json.loads((Path(model) / "config.json").read_text())
        self.max_length = int(max_length or config["max_position_embeddings"])
        self.add_bos_token = add_bos_token
        self.generation = self.generation_defaults(model)
        self.generated = 0  # texts so far: each is drawn with another seed

    def command(self, name):
        """The program `name` of the same build, with the options of both programs."""
        return [self.program.with_name(name + ("_cuda" if self.program.name.endswith("_cuda") else "")), *self.options]

    @staticmethod
    def generation_defaults(model):
        """Sampling as the model's generation_config.json, or transformers, has it; what else it asks for is refused."""
        if not (Path(model) / "generation_config.json").exists():
            return {"top_p": 1.0, "top_k": 50, "max_new_tokens": None}
        config = transformers.GenerationConfig.from_pretrained(model).to_dict()
        for key, neutral in UNSUPPORTED.items():
            if config.get(key) not in (None, neutral):
                sys.exit(f"{model}/generation_config.json: \"{key}\" is {config[key]}, which is not supported")
        return {"top_p": config.get("top_p") or 1.0, "top_k": 50 if config.get("top_k") is None else config["top_k"],
                "max_new_tokens": config.get("max_new_tokens")}  # fmt: skip

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
        """As the harness's `hf`: with what the tokenizer adds, unless the text begins with it or the caller decides."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        if add_special_tokens is None:
            return self.tokenizer.encode(string)
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        if not requests:
            return []
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for _, context, continuation in requests:
                file.write(json.dumps({"context_ids": context, "continuation_ids": continuation}) + "\n")
            file.flush()
            command = [*self.command("eval_llama3"), "--score", file.name, *self.sequence(requests)]
            lines = run(command).rstrip("\n").split("\n")  # splitlines() would also cut at U+2028 in an "id"
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

    def generation_request(self, context, options):
        """A line of --prompts FILE.jsonl, and the texts at which its answer is cut."""
        options = normalize_gen_kwargs(options)
        until = handle_stop_sequences(options.pop("until", None), eos=self.tokenizer.decode(self.eot_token_id))
        new, samples = options.pop("max_gen_toks"), options.pop("do_sample")
        temperature = options.pop("temperature", 0.0)
        sampling = {key: options.pop(key, self.generation[key]) for key in SAMPLING}
        for key, value in options.items():
            if value not in (None, UNSUPPORTED.get(key)):
                sys.exit(
                    f"the task's generation option {key} = {value} is not supported: expected until, "
                    "max_gen_toks, do_sample, temperature, top_p and top_k"
                )
        if new >= self.max_length:
            sys.exit(f"the task generates {new} tokens, and the model has {self.max_length} positions")
        ids = self.tok_encode(context) or [self.prefix_token_id]
        self.generated += 1
        longest = self.generation["max_new_tokens"] or new  # it comes before the task's number, as in transformers
        request = {"prompt_ids": ids[new - self.max_length :], "max_tokens": longest, "temperature": 0.0}
        if samples:
            request |= sampling | {"temperature": temperature, "seed": self.generated}
        return request, until

    def generate_until(self, requests, disable_tqdm=False):
        if not requests:
            return []
        lines, answers = [self.generation_request(*request.args) for request in requests], []
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps(line) + "\n" for line, _ in lines)
            file.flush()
            done = run([*self.command("generate_llama3"), "--prompts", file.name]).rstrip("\n").split("\n")
        for request, answer, (_, until) in zip(requests, done, lines, strict=True):
            text = self.tokenizer.decode(json.loads(answer)["ids"], skip_special_tokens=True)
            text = postprocess_generated_text(text, until, None)
            self.cache_hook.add_partial("generate_until", request.args, text)
            answers.append(text)
        return answers


if __name__ == "__main__":
    cli_evaluate()
