"""parquet.py: streams the text column of Parquet files, as JSON lines, into the tokenizer.

    pip install pyarrow
    python dev/data/parquet.py [--field text] FILE|FOLDER... -- \\
        build/data/tokenize --tokenizer F --out-train A.tok --out-val B.tok -

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


def write_lines(paths, field, out):
    """Writes the lines of all files. Returns how many rows there were, and how many of them had no text."""
    import pyarrow
    import pyarrow.parquet

    rows = skipped = 0
    for path in files_of(paths):
        try:
            file = pyarrow.parquet.ParquetFile(path)
            names = file.schema_arrow.names
            if field not in names:
                die(f"{path} has no column '{field}', only {', '.join(names)}: choose one with --field")
            for batch in file.iter_batches(batch_size=ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    rows += 1
                    if text is not None and not isinstance(text, str):
                        die(f"{path}: column '{field}' is of type {batch.schema.field(0).type}, expected text")
                    if not text:
                        skipped += 1
                        continue
                    out.write(json.dumps({"text": text}, ensure_ascii=False).encode("utf-8") + b"\n")
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
        die(f"{command[0]} cannot be started: {error.strerror}; make -C dev/data builds the tools")
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
            die("a command is missing after --: expected build/data/tokenize with its options and -")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--field", default="text", help="the column that holds the text (text)")
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
