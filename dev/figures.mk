# figures.mk: the figures of the book (dev/figures).
## make figures    the figures of the book, each drawn from a fresh run (NAMES="cp-mask …": only those)
# `make figures` redraws all of them from fresh runs, NAMES="cp-mask …" only those. It takes some minutes.
.PHONY: figures figures-programs figure-programs-fp32 figure-programs-bf16

figures: figures-programs
	@python3 dev/figures/figures.py $(NAMES)

figures-programs:
	@$(MAKE) --no-print-directory PRECISION=fp32 figure-programs-fp32
	@$(MAKE) --no-print-directory PRECISION=bf16 figure-programs-bf16

figure-programs-fp32 figure-programs-bf16: $(BUILD)/train_llama3 $(BUILD)/plan_llama3
	@$(MAKE) --no-print-directory -C dev/kernels PRECISION=$(PRECISION) \
	    $(addprefix ../../build/kernels-$(PRECISION)/,linear attention)
