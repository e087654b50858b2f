# fault_lab.mk: the fault laboratory (dev/fault_lab, docs/book/fault-lab.md). The Makefile includes it.
FAULT_BUILD := build/fault_lab/healthy

faults:
	@dev/fault_lab/lab.sh list

# -O1: compiling takes longer than training a small model
fault-programs:
	@$(MAKE) --no-print-directory -s -j2 PRECISION=fp32 CFLAGS=-O1 BUILD=$(FAULT_BUILD) \
	    $(addprefix $(FAULT_BUILD)/,train_llama3 tokens_llama3 test_llama3)

fault: fault-programs
	@dev/fault_lab/lab.sh fault "$$N"

fault-answer: fault-programs
	@dev/fault_lab/lab.sh answer "$$N"

.PHONY: faults fault fault-answer fault-programs
