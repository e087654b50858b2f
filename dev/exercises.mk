# exercises.mk: questions about the program that are checked by running it (docs/book/exercises.md).
# make passes N and A on in the environment, so that the shell does not interpret what an answer contains.
EXERCISE = @MAKE='$(MAKE)' python3 dev/exercises/exercise.py

exercise:
	$(EXERCISE) $(if $(N),question "$$N",list)

answer:
	$(EXERCISE) answer "$$N" "$$A"

solution:
	$(EXERCISE) solution "$$N"

.PHONY: exercise answer solution
