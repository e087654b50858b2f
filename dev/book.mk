# book.mk: the book. The Makefile includes it.
## make book-test  runs the commands of its chapters (PAGE=NN: of one)
# `make book` installs mkdocs-material into build/book/venv; with PYTHON=FILE it uses that Python, which must have it.
BOOK_PYTHON := $(or $(PYTHON),build/book/venv/bin/python)

book: $(if $(PYTHON),,build/book/venv/installed)
	@NO_MKDOCS_2_WARNING=1 $(BOOK_PYTHON) -m mkdocs build --quiet --strict -f dev/book/mkdocs.yml
	@echo "wrote build/book/html/book/index.html"

build/book/venv/installed:
	@mkdir -p build/book
	@python3 -m venv build/book/venv || { echo "error: make book needs Python's venv (Debian: apt-get install \
	    python3-venv), or PYTHON=FILE with mkdocs-material and pygments" >&2; exit 1; }
	build/book/venv/bin/pip install -q 'mkdocs-material==9.*' pygments
	@touch $@

# the commands of all chapters, or of PAGE=NN
book-test: deps
	@$(MAKE) --no-print-directory PRECISION=fp32 $(addprefix build/cpu-fp32/,train_llama3 plan_llama3 tokens_llama3)
	@$(MAKE) --no-print-directory PRECISION=bf16 build/cpu-bf16/plan_llama3
	@dev/test/book.sh $(PAGE)

.PHONY: book book-test
