# course.mk: what dev/course has: the book's exercises, the fault laboratory, the book's figures, and the planner in a
# browser. The Makefile includes it.

# ---------------------------------------------------------------- exercises (docs/book/exercises.md)
# make passes N and A on in the environment, so that the shell does not interpret what an answer contains.
EXERCISE = @MAKE='$(MAKE)' python3 dev/course/exercises/exercise.py

exercise:
	$(EXERCISE) $(if $(N),question "$$N",list)

answer:
	$(EXERCISE) answer "$$N" "$$A"

solution:
	$(EXERCISE) solution "$$N"

.PHONY: exercise answer solution

# ---------------------------------------------------------------- fault laboratory (docs/book/fault-lab.md)
FAULT_BUILD := build/fault_lab/healthy

faults:
	@dev/course/fault_lab/lab.sh list

# -O1: compiling takes longer than training a small model
fault-programs:
	@$(MAKE) --no-print-directory -s -j2 PRECISION=fp32 CFLAGS=-O1 BUILD=$(FAULT_BUILD) \
	    $(addprefix $(FAULT_BUILD)/,train_llama3 tokens_llama3 test_llama3)

fault: fault-programs
	@dev/course/fault_lab/lab.sh fault "$$N"

fault-answer: fault-programs
	@dev/course/fault_lab/lab.sh answer "$$N"

.PHONY: faults fault fault-answer fault-programs

# ---------------------------------------------------------------- figures
## make figures    the figures of the book, each drawn from a fresh run (NAMES="cp-mask …": only those); minutes
.PHONY: figures figures-programs figure-programs-fp32 figure-programs-bf16

figures: figures-programs
	@python3 dev/course/figures/figures.py $(NAMES)

figures-programs:
	@$(MAKE) --no-print-directory PRECISION=fp32 figure-programs-fp32
	@$(MAKE) --no-print-directory PRECISION=bf16 figure-programs-bf16

figure-programs-fp32 figure-programs-bf16: $(BUILD)/train_llama3 $(BUILD)/plan_llama3
	@$(MAKE) --no-print-directory -C dev/kernels PRECISION=$(PRECISION) \
	    $(addprefix ../../build/kernels-$(PRECISION)/,linear attention)

# ---------------------------------------------------------------- planner
## make planner    build/planner.html: plan_llama3 in a browser, as one page without a server (with emscripten)
# Emscripten compiles the program for wasm64, in which pointers have 64 bits, because the addresses of a dry run go far
# beyond 4 GB. Binaryen then lowers its memory to 32 bits, which every browser has; those addresses are never used.
PLANNER_DIR  := build/planner
EMSCRIPTEN_NEEDED := $(if $(call program,emcc),,emscripten) $(if $(call program,dpkg-source),,dpkg-dev) \
                     $(if $(call program,python3),,python3)
# The libraries of Debian's emscripten are for 32-bit pointers; those for 64 bits are built once, into this folder.
EMSCRIPTEN_HERE := EM_CACHE=$(abspath $(PLANNER_DIR)/emscripten) EM_FROZEN_CACHE= EM_IGNORE_SANITY=1
EMCC := $(EMSCRIPTEN_HERE) emcc -sMEMORY64=2
WASM_LIBRARIES := $(PLANNER_DIR)/emscripten/sysroot/lib/wasm64-emscripten
WASM_FLAGS := -O2 -std=c11 -mbulk-memory -ffp-contract=off -D_GNU_SOURCE -Idev/course/planner
PLANNER_SOURCES := $(PLANNER_DIR)/sources
PLANNER_OBJECTS := $(addprefix $(PLANNER_DIR)/,host.o version.o run_html.o cJSON.o crc32.o zutil.o)
PLANNER_MODULES := $(PLANNER_DIR)/fp32.wasm $(PLANNER_DIR)/bf16.wasm
PLANNER_PARTS   := $(wildcard dev/pages/*.js $(addprefix dev/course/planner/,*.js *.html *.css *.py))

planner: build/planner.html
	@echo "built $<: open it in a browser"

build/planner.html: $(PLANNER_MODULES) $(PLANNER_DIR)/program.json $(PLANNER_PARTS) $(wildcard dev/clusters/*.json)
	python3 dev/course/planner/make_page.py $(PLANNER_DIR) $@

emscripten-needed:
	@$(if $(strip $(EMSCRIPTEN_NEEDED)),echo "error: make planner compiles plan_llama3 to WebAssembly; missing:" \
	    "$(strip $(EMSCRIPTEN_NEEDED)). Install with: $(INSTALL) $(strip $(EMSCRIPTEN_NEEDED))" >&2; exit 1)

$(addprefix $(PLANNER_DIR)/of_program-,fp32 bf16): $(PLANNER_DIR)/of_program-%: dev/course/planner/of_program.c \
        $(PLANNER_DIR)/pages.o | needed
	@mkdir -p $(@D)
	$(CC) $(filter-out -DPRECISION_BF16,$(FLAGS)) $(if $(filter bf16,$*),-DPRECISION_BF16) -Wno-unused-function \
	    $(depend) $< $(PLANNER_DIR)/pages.o -o $@ $(LIBS)

$(PLANNER_DIR)/program.json: $(PLANNER_DIR)/of_program-fp32
	$< page > $@

$(PLANNER_SOURCES)/include/zlib.h: dev/course/planner/fetch_sources.sh | emscripten-needed
	dev/course/planner/fetch_sources.sh $(PLANNER_SOURCES)
	@touch $@

$(WASM_LIBRARIES)/libc.a: | emscripten-needed
	@echo "building emscripten's C library for 64-bit pointers, once: it takes a few minutes"
	@mkdir -p $(PLANNER_DIR)
	@$(EMSCRIPTEN_HERE) embuilder --wasm64 build libc libdlmalloc libcompiler_rt \
	    > $(PLANNER_DIR)/embuilder.log 2>&1 || { tail -n 3 $(PLANNER_DIR)/embuilder.log >&2; exit 1; }

# Nothing is compiled before the C library is there, because two compilers would build it at the same time.
$(PLANNER_OBJECTS) $(PLANNER_MODULES:.wasm=.o): | $(WASM_LIBRARIES)/libc.a
$(PLANNER_DIR)/host.o: dev/course/planner/host.c
	$(EMCC) $(WASM_FLAGS) -Wall -Wextra -c $< -o $@

$(PLANNER_DIR)/version.o: $(PLANNER_DIR)/commit.o
	$(EMCC) -c $(PLANNER_DIR)/commit.c -o $@

$(PLANNER_DIR)/run_html.o: $(PLANNER_DIR)/pages.o
	$(EMCC) -c $(PLANNER_DIR)/pages.c -o $@

$(PLANNER_DIR)/cJSON.o: $(PLANNER_SOURCES)/include/zlib.h
	$(EMCC) $(WASM_FLAGS) -w -c $(PLANNER_SOURCES)/cjson/cJSON.c -o $@

$(PLANNER_DIR)/crc32.o $(PLANNER_DIR)/zutil.o: $(PLANNER_SOURCES)/include/zlib.h
	$(EMCC) $(WASM_FLAGS) -w -c $(PLANNER_SOURCES)/zlib/$(@F:.o=.c) -o $@

# Emscripten's int64_t is a long long and its PRId64 says long, of the same size: -Wno-format.
$(PLANNER_DIR)/fp32.o $(PLANNER_DIR)/bf16.o: $(PLANNER_DIR)/%.o: programs/plan_llama3.cu \
        dev/course/planner/omp.h $(PLANNER_DIR)/of_program-% $(PLANNER_SOURCES)/include/zlib.h
	$(EMCC) -x c $(WASM_FLAGS) -I$(PLANNER_SOURCES)/include $(if $(filter bf16,$*),-DPRECISION_BF16) \
	    $$($(PLANNER_DIR)/of_program-$* vectors) -Wall -Wextra -Wno-unused -Wno-unused-parameter \
	    -Wno-unknown-pragmas -Wno-format $(depend) -c $< -o $@

# What the program imports is in host.c or in the page; a call that is in neither is an error when it is made.
$(PLANNER_MODULES): %.wasm: %.o $(PLANNER_OBJECTS)
	wasm-ld -mwasm64 $^ -L$(WASM_LIBRARIES) -lc -ldlmalloc -lcompiler_rt --no-entry --export=__wasm_call_ctors \
	    --import-undefined --strip-debug -z stack-size=4194304 --max-memory=4294967296 -o $@.64
	wasm-opt --memory64-lowering -O3 --enable-memory64 --enable-bulk-memory --enable-sign-ext \
	    --enable-nontrapping-float-to-int $@.64 -o $@

.PHONY: planner emscripten-needed
