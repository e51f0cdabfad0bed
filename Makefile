# A face over dev.py, for those who type make. `make` alone lists the tasks.
TASKS := search test slow extras torch lint cpp bench examples package clean

help:
	@python3 dev.py

$(TASKS):
	@python3 dev.py $@

.PHONY: help $(TASKS)
