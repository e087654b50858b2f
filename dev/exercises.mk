# exercises.mk: questions about the program that are checked by running it (docs/book/exercises.md).
# N and A reach exercise.py through the environment, so an answer may contain whatever the shell would interpret.
EXERCISE = @python3 dev/exercises/exercise.py

exercise:
	$(EXERCISE) $(if $(N),question "$$N",list)

answer:
	$(EXERCISE) answer "$$N" "$$A"

solution:
	$(EXERCISE) solution "$$N"

exercise answer solution: export MAKE := $(MAKE)
exercise answer solution: export N := $(N)
exercise answer solution: export A := $(value A)

.PHONY: exercise answer solution
