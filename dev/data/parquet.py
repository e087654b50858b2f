"""parquet.py: streams a column of Parquet files, texts or conversations, as JSON lines into the tools of this folder.

    pip install pyarrow
    python dev/data/parquet.py [--field text] FILE|FOLDER... -- \\
        ./tokens_llama3 --tokenizer F --out-train A.tok --out-val B.tok -
    python dev/data/parquet.py --field messages FILE|FOLDER... -- \\
        ./tokens_llama3 --conversations --tokenizer F --out-train A.tok -

A conversation is a list of messages, each with "role" and "content".
The files are read in the order of the command line, those of a folder (*.parquet, also in folders below) by name. A few
thousand rows are in memory at a time. Rows without text are skipped and counted. The command after -- reads the lines
from its standard input; if a file cannot be read, the command is killed before its input ends, so that it never takes a
part of the data for all of it. Without a command, the lines go to standard output.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROWS = 4096  # that are decoded at a time


def die(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def files_of(paths):
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.rglob("*.parquet"), key=lambda p: str(p).encode())
        if not found:
            die(f"{path} holds no *.parquet file; expected a folder of them")
        yield from found


# Columns that change what a conversation means, as keys beside "messages" do.
BESIDE_MESSAGES = ["tools", "functions", "documents", "system", "system_prompt", "images", "videos",
                   "chat_template_kwargs"]  # fmt: skip
# Columns that say which messages have a loss: tokens_llama3 refuses them beside "messages", whatever their value.
LOSS = ["weight", "loss_weight", "loss_mask", "loss", "train", "trainable", "training", "masked", "ignore"]


def line_of(value, where):
    """The object of a row: a text, or a conversation. What says nothing in a message is left out."""
    if isinstance(value, str):
        if "\0" in value:
            die(f"{where}: found a NUL in the text, expected none: correct or remove the row")
        return {"text": value}
    return {"messages": [{key: item for key, item in message.items() if item is not None} for message in value]}


def is_conversation(value):
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def write_lines(paths, field, out):
    """Writes the lines of all files. Returns how many rows there were, and how many of them had no text."""
    import pyarrow
    import pyarrow.parquet

    rows = skipped = 0
    for path in files_of(paths):
        row = -1  # of this file, from 0
        try:
            with open(path, "rb") as begin:
                if begin.read(24) == b"version https://git-lfs.":
                    die(f"{path} is a Git LFS pointer: run git lfs pull in its repository")
            file = pyarrow.parquet.ParquetFile(path)
            names = file.schema_arrow.names
            unread = [name for name in BESIDE_MESSAGES + LOSS if name in names and name != field]
            if field not in names:
                die(f"{path} has no column '{field}', only {', '.join(names)}: choose one with --field")
            for batch in file.iter_batches(batch_size=ROWS, columns=[field, *unread]):
                columns = batch.to_pydict()
                for number, value in enumerate(columns[field]):
                    rows += 1
                    row += 1
                    if value is not None and not isinstance(value, str) and not is_conversation(value):
                        kind = batch.schema.field(field).type
                        die(f"{path}: column '{field}' is of type {kind}, expected text, or lists of messages")
                    if not value:
                        skipped += 1
                        continue
                    where = f"{path}, row {row} (the first is 0)"
                    line = line_of(value, where)
                    if "messages" in line:  # the reader of the lines refuses what it cannot render
                        for name in unread:
                            item = columns[name][number]
                            if item or (item is not None and name in LOSS):
                                line[name] = item
                    try:
                        out.write(json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n")
                    except TypeError as error:
                        die(f"{where}: {error}: remove the value, or convert the rows yourself")
        except (OSError, pyarrow.ArrowException, UnicodeError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            die(f"{path} cannot be read: {' '.join(str(error).split())}; expected a Parquet file")
    out.flush()
    return rows, skipped


def run(command, paths, field):
    """Pipes the lines into the command. Returns its exit code."""
    try:
        reader = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError as error:
        die(f"{command[0]} cannot be started: {error.strerror}; make tokens_llama3 builds it")
    try:
        counts = write_lines(paths, field, reader.stdin)
        reader.stdin.close()
    except BrokenPipeError:  # the command ended early and has said why
        return reader.wait() or 1
    except BaseException:
        reader.kill()
        reader.wait()
        raise
    return reader.wait() or report(*counts)


def report(rows, skipped):
    print(f"{rows} rows, {skipped} of them skipped because they have no text", file=sys.stderr)
    return 0


def main():
    arguments, command = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, command = arguments[:at], arguments[at + 1 :]
        if not command:
            die("a command is missing after --: expected tokens_llama3 with its options and -")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--field", default="text", help="the column that holds the texts or conversations (text)")
    parser.add_argument("paths", nargs="+", metavar="FILE|FOLDER")
    args = parser.parse_args(arguments)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        die("pyarrow is not installed: pip install pyarrow")
    if command:
        sys.exit(run(command, args.paths, args.field))
    try:
        report(*write_lines(args.paths, args.field, sys.stdout.buffer))
    except BrokenPipeError:
        sys.stderr.close()  # the reader ended early and has said why
        sys.exit(1)


if __name__ == "__main__":
    main()
