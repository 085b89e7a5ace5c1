# Every target does its own set-up: it needs python3 (3.11 or newer) with venv, and on its first run a network for pip.
# What it installs is in .venv; a stamp there per dependency group makes the second run start at once, offline too.
#
#   make demo       crawl the local site farm, then the same crawl in one plain asyncio process
#   make test       what every change must pass: each test on the engines and loops where it differs  PYTEST_ARGS="-k ring" for a part
#   make test-threads  the contract over threads: with this Python, and on python3.14t, where it is built, without a GIL and with one
#   make demo-threads  the article's program and payloads on processes and on threads, side by side
#   make test-full  the same on every engine and under every loop, then test-fallbacks and test-examples: for the night
#   make test-fallbacks  the contract suite with the system calls that others lack switched off, all of them and one by one
#   make test-all   test-full under every Python found (3.11 to 3.15), each in .venvs/X.Y
#   make long       the tests that repeat one thing, with their full counts
#   make repeat     the tests with the most races, fifty times, while every CPU has four times the work it can do
#                   REPEAT_TIMES=3 for fewer, REPEAT_MINUTES=30 for a limit, REPEAT_ARGS="tests/unit -k ring" for other tests
#   make python3.14t  a free-threaded CPython in build/, from Debian's source, in three minutes; PGO=1 for figures to publish, in twenty
#   make stdlib     CPython's own tests of executors, under every Python found that has them, in .venvs/X.Y
#   make sweep      strikes at every step of a call's and a worker's life; SWEEP_ARGS="-k bell" for a part of it
#   make syscalls   lets each system call fail, the first time, the second time, and so on; SYSCALLS_ARGS="-k start" for a part of it
#   make many-workers  a thousand workers: start, calls, close, descriptors left; WORKERS=200 for fewer
#   make scale      a million pending calls, a million keys, a hundred thousand streams that are left: the longest step of the loop
#   make fuzz       ten million frames of a ring and as many of a link, 200,000 lies of a worker and 20,000 of a fork server
#   make mutants    small faults in the source, and whether the tests notice them; MUTANTS=300, MUTANTS_ARGS="--seed 2"
#   make chaos      kills workers at random under load; CHAOS_KILLS=10000 for more, CHAOS_SEED=... for the same decisions again
#   make soak       two hours of constant work with deaths, reloads and recycling: does anything grow?  SOAK_MINUTES=20 for less;
#                   SOAK_ENGINE=threads, and build/soak has the series
#   make chaos-nodes  the same with workers on several nodes, whose hosts and links are struck, too; 200 kills
#   make chaos-threads  the same with workers that are threads, as far as a thread can be struck
#   make docs       the site, from docs/ and the docstrings, into build/site; a warning is an error
#   make test-docs  runs every block of code in docs/ and the README, and checks links and names  PYTEST_ARGS="-k service" for a part
#   make test-examples  runs the programs in examples/ as a person does, and asserts their results; PYTEST_ARGS="-k crawler" for one
#   make test-programs  runs other people's programs with percore in them; PYTEST_ARGS="-k gunicorn" for one
#   make test-browser  looks at the dashboard and the flame graph in a headless Chromium, where there is one
#   make test-ray   workers on a real Ray cluster of two nodes, with Ray in .venvs/ray, in a network of loopback alone
#   make demo-ray   the polite crawler over the two nodes of a Ray cluster, one of which is killed half-way
#   make ray-head, ray-stop   a Ray cluster of two nodes in a network of loopback alone, to try by hand
#   make bench-ray  the benchmarks of workers on a Ray cluster
#   make lint       ruff, mypy --strict and pyright
#   make package    builds the sdist and the wheel, checks them, and installs the wheel in a clean environment
#   make package-all   the same, with every Python found
#   make bench      every benchmark, in half an hour  QUICK=1 in five minutes; BENCH_ARGS="--list" passes arguments on
#   make bench-check   the cheap ones in a minute, against those on record; status 1 when one became worse
#   make bench-record  every benchmark, as the new record: its JSON, and the tables and plots of docs/performance*.md
#   make bench-supplement VENV=.venvs/3.14 PYTHON=python3.14   beside it, what the record's Python lacks, with a newer one
#   make clean      remove what the targets above made
#
# PYTHON=/path/to/python3 chooses the interpreter a new environment is made with.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
# Three for two CPUs, unless JOBS was given: a test waits for about as long as it computes.
TEST_JOBS ?= $(if $(filter file,$(origin JOBS)),3,$(JOBS))
CHAOS_KILLS ?= 1000
RUN    := $(VENV)/bin/python

comma  := ,
SOURCES := $(wildcard src tests examples benchmarks scripts)

# The tests start thousands of interpreters: each would compile percore anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.NOTPARALLEL:
# The ways of other systems, forced on Linux.
WITHOUT_ALL := memfd,eventfd,pidfd,setsig,uvloop,reuseport
.PHONY: help demo demo-threads python3.14t test test-threads test-full test-fallbacks test-all long repeat sweep syscalls stdlib stdlib-one chaos chaos-nodes chaos-threads soak docs test-docs test-examples test-programs test-browser lint package package-all bench bench-check bench-record bench-supplement clean stale
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

# An environment knows where the project lies: in a folder that was moved or copied, or when its interpreter is gone, no stamp counts.
ifneq ($(shell test -x $(RUN) && cat $(VENV)/.percore-home 2>/dev/null),$(CURDIR))
STALE := stale
endif

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "percore needs Python 3.11 or newer; choose one: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv --clear $(VENV)

# The shell's word for the group of what has no builds for a Python without a GIL; nothing in such a Python.
HAS_GIL := $$($(RUN) -c 'import sys; print("" if "t" in sys.abiflags else "--group test-gil")')

# One stamp per dependency group of pyproject.toml: $(VENV)/.percore-test says that the group `test` is installed as it stands there now.
# The interpreter only has to be there: its time is the system's and may be newer than any stamp.
$(VENV)/.percore-%: pyproject.toml $(STALE) | $(RUN)
	@$(RUN) -m pip install --quiet --disable-pip-version-check 'pip>=25.1'  # older ones know no dependency groups
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable . $(addprefix --group ,$(subst $(comma), ,$*)) $(if $(findstring test,$*),$(HAS_GIL))
	@printf '%s' '$(CURDIR)' >$(VENV)/.percore-home
	@touch $@

demo: $(VENV)/.percore-examples
	$(RUN) examples/scrape.py

# Whole files, in the order of tests/order.py.
BY_FILE := --dist loadfile --no-loadscope-reorder
# In CI, up to three tests that fail are run once more, alone, and named.
PYTEST := $(if $(CI),scripts/once_more.py,-m pytest)

test: $(VENV)/.percore-test
	$(RUN) $(PYTEST) -n $(TEST_JOBS) $(BY_FILE) $(PYTEST_ARGS)
	@$(if $(PYTEST_ARGS),,PERCORE_WITHOUT=$(WITHOUT_ALL) $(RUN) $(PYTEST) -n $(TEST_JOBS) $(BY_FILE) --rows=fallbacks tests/contract)

# The environment of the free-threaded interpreter is .venvs/3.14t. PYTHON_GIL=1 turns its GIL on.
test-threads: $(VENV)/.percore-test
	$(RUN) $(PYTEST) -n $(TEST_JOBS) $(BY_FILE) --rows=threads tests/contract $(PYTEST_ARGS)
	@if test -x build/python3.14t/bin/python3; then \
		$(MAKE) --no-print-directory test-free-threads VENV=.venvs/3.14t PYTHON=build/python3.14t/bin/python3; \
	else \
		echo "== python3.14t is not built, and so not tested: make python3.14t"; \
	fi

.PHONY: test-free-threads
test-free-threads: $(VENV)/.percore-test
	PYTHON_GIL=0 $(RUN) -m pytest -n $(JOBS) $(BY_FILE) --rows=threads tests/contract $(PYTEST_ARGS)
	PYTHON_GIL=1 $(RUN) -m pytest -n $(JOBS) $(BY_FILE) --rows=threads tests/contract $(PYTEST_ARGS)

demo-threads: $(VENV)/.percore-test
	$(RUN) examples/threads.py

# tests/rows.py says which rows `make test` leaves out.
test-full: $(VENV)/.percore-test
	$(RUN) -m pytest -n $(JOBS) $(BY_FILE) --rows=full $(PYTEST_ARGS)
	@$(if $(PYTEST_ARGS),,$(MAKE) --no-print-directory test-fallbacks)
	@$(if $(PYTEST_ARGS),,$(MAKE) --no-print-directory test-examples PYTEST_ARGS=--rows=full)

test-fallbacks: $(VENV)/.percore-test
	@for one in $(WITHOUT_ALL) $(subst $(comma), ,$(WITHOUT_ALL)); do \
		echo "== without $$one"; \
		PERCORE_WITHOUT=$$one $(RUN) -m pytest -q -n $(JOBS) $(BY_FILE) tests/contract || exit; \
	done

long: $(VENV)/.percore-test
	PERCORE_LONG=1 $(RUN) -m pytest -n $(JOBS) -m long -o faulthandler_timeout=0 -o timeout=600 $(PYTEST_ARGS)

# The runs are the load. Ctrl-C sums up.
REPEAT_TIMES ?= 50
repeat: $(VENV)/.percore-test
	$(RUN) scripts/repeat.py --times $(REPEAT_TIMES) $(if $(REPEAT_MINUTES),--minutes $(REPEAT_MINUTES)) -- $(REPEAT_ARGS)

# Given by name: what takes minutes is not found by `make test`.
sweep: $(VENV)/.percore-test
	$(RUN) $(PYTEST) -n $(JOBS) tests/sweep/kill_points.py tests/sweep/thread_points.py $(SWEEP_ARGS)

# As the sweep. It needs strace, and the permission to attach.
syscalls: $(VENV)/.percore-test
	$(RUN) -m pytest -n $(JOBS) -o faulthandler_timeout=0 tests/syscalls/failing.py $(SYSCALLS_ARGS)

.PHONY: fuzz mutants many-workers scale
WORKERS ?= 1000
many-workers: $(VENV)/.percore-test
	$(RUN) scripts/many_workers.py $(WORKERS)

scale: $(VENV)/.percore-test
	$(RUN) -m tests.scale $(SCALE_ARGS)

fuzz: $(VENV)/.percore-test
	PERCORE_LONG=1 $(RUN) -m pytest -n $(JOBS) -m long -o faulthandler_timeout=0 -o timeout=3600 tests/unit/test_ring_fuzz.py tests/unit/test_wire_fuzz.py tests/unit/test_broken_workers.py tests/unit/test_fork_server_lies.py

MUTANTS ?= 300
mutants: $(VENV)/.percore-test
	nice -n 10 $(RUN) scripts/mutants.py $(MUTANTS) $(MUTANTS_ARGS)

chaos: $(VENV)/.percore-test
	CHAOS_KILLS=$(CHAOS_KILLS) CHAOS_SEED=$(CHAOS_SEED) $(RUN) -m tests.chaos

# Fewer by default: a lost node takes its time.
chaos-nodes: $(VENV)/.percore-test
	CHAOS_KILLS=$(if $(filter file,$(origin CHAOS_KILLS)),200,$(CHAOS_KILLS)) CHAOS_SEED=$(CHAOS_SEED) $(RUN) -m tests.chaos --nodes

chaos-threads: $(VENV)/.percore-test
	CHAOS_KILLS=$(CHAOS_KILLS) CHAOS_SEED=$(CHAOS_SEED) $(RUN) -m tests.chaos.threads

# Its variables reach it through the environment: SOAK_MINUTES, SOAK_ENGINE, SOAK_RATE, SOAK_SEED.
soak: $(VENV)/.percore-test
	$(RUN) -m tests.soak $(SOAK_ARGS)

# Given by name, like them. PERCORE_PICTURES=folder keeps pictures of the pages.
test-browser: $(VENV)/.percore-test
	$(RUN) $(PYTEST) tests/browser/pages.py $(PYTEST_ARGS)

lint: $(VENV)/.percore-test,lint,bench
	$(RUN) -m ruff check $(SOURCES)
	$(RUN) -m ruff format --check $(SOURCES)
	$(RUN) -m mypy $(SOURCES)
	$(RUN) -m pytest -q tests/typing

docs: $(VENV)/.percore-docs
	@mkdir -p build
	@$(VENV)/bin/zensical build --strict --clean >build/docs.log 2>&1; status=$$?; sed 's/\x1b\[[0-9;]*m//g' build/docs.log; exit $$status
	@! grep -q '^griffe:' build/docs.log || { echo "== a docstring does not parse: see above"; exit 1; }
	@! grep -rlE '<(script|img|iframe)[^>]+src="(https?:)?//|<link[^>]+"(stylesheet|preconnect|icon)"[^>]+"(https?:)?//' build/site || \
	{ echo "== these pages need a network"; exit 1; }

test-docs: $(VENV)/.percore-docs-test
	$(RUN) $(PYTEST) -n $(JOBS) tests/docs $(PYTEST_ARGS)

# `make test` leaves the programs of examples/ to it: they use what percore promises, and the tests of that are elsewhere.
test-examples: $(VENV)/.percore-test
	$(RUN) $(PYTEST) -n $(TEST_JOBS) $(BY_FILE) tests/examples $(PYTEST_ARGS)

# Given by name: `make test` does without these programs.
test-programs: $(VENV)/.percore-programs
	$(RUN) -m pytest -n $(JOBS) tests/programs/programs.py $(PYTEST_ARGS)

# Given by name, too. Ray is large, so it has an environment of its own.
RAY := .venvs/ray
.PHONY: test-ray ray-head ray-stop demo-ray bench-ray

test-ray:
	@$(PYTHON) scripts/loopback.py --check || exit 0; \
	$(MAKE) --no-print-directory VENV=$(RAY) $(RAY)/.percore-ray && \
	$(PYTHON) scripts/loopback.py $(RAY)/bin/python -m tests.ray.cluster -p no:cacheprovider tests/ray/ray_cluster.py $(PYTEST_ARGS)

demo-ray:
	@$(PYTHON) scripts/loopback.py --check || exit 0; \
	$(MAKE) --no-print-directory VENV=$(RAY) $(RAY)/.percore-ray,examples && \
	$(PYTHON) scripts/loopback.py $(RAY)/bin/python examples/cluster.py

# A cluster to try by hand, in its own network: `make ray-head` says how to run programs there.
ray-head:
	@$(PYTHON) scripts/loopback.py --check || exit 0; \
	$(MAKE) --no-print-directory VENV=$(RAY) $(RAY)/.percore-ray && $(PYTHON) scripts/ray_head.py start $(RAY)/bin/python

ray-stop:
	@$(PYTHON) scripts/ray_head.py stop

bench-ray:
	@$(PYTHON) scripts/loopback.py --check || exit 0; \
	$(MAKE) --no-print-directory VENV=$(RAY) $(RAY)/.percore-ray && \
	$(PYTHON) scripts/loopback.py $(RAY)/bin/python -m benchmarks $(if $(QUICK),--quick) ray ray_deaths ray_start

package: $(VENV)/.percore-package
	$(RUN) scripts/package.py $(RUN)

package-all: $(VENV)/.percore-package
	$(RUN) scripts/package.py $$($(RUN) scripts/interpreters.py | cut -f2)

BENCH_OUT := build/bench

bench: $(VENV)/.percore-bench
	$(RUN) -m benchmarks $(if $(QUICK),--quick) --json $(BENCH_OUT)/run.json --plots $(BENCH_OUT) $(BENCH_ARGS)

# The rows with targets against InterpreterPoolExecutor alone.
SUPPLEMENT := payload_arrays payload_containers payload_sizes

bench-supplement: $(VENV)/.percore-bench
	@$(RUN) -c 'import concurrent.futures as f; f.InterpreterPoolExecutor' 2>/dev/null || \
	{ echo "$(RUN) has no InterpreterPoolExecutor: make bench-supplement VENV=.venvs/3.14 PYTHON=python3.14"; exit 1; }
	@QUICK= $(RUN) -m benchmarks --json benchmarks/supplement.json $(SUPPLEMENT); status=$$?; \
	$(RUN) -m benchmarks --docs && exit $$status

bench-check: $(VENV)/.percore-bench
	$(RUN) -m benchmarks --check

# A record that no commit has yet is no record before: the figures that are kept stay those of the last commit's record.
bench-record: $(VENV)/.percore-bench
	@! git diff --quiet HEAD -- benchmarks/record.json || $(RUN) -m benchmarks --keep
	@QUICK= $(RUN) -m benchmarks $(BENCH_ARGS) --json benchmarks/record.json; status=$$?; \
	$(RUN) -m benchmarks --docs && exit $$status

test-all:
	@mkdir -p .venvs && $(PYTHON) scripts/interpreters.py >.venvs/found
	@failed=; tab=$$(printf '\t'); \
	while IFS="$$tab" read -r version python <&3; do \
	    echo "== Python $$version: $$python"; \
	    $(MAKE) --no-print-directory test-full VENV=".venvs/$$version" PYTHON="$$python" 3<&- || failed="$$failed $$version"; \
	done 3<.venvs/found; \
	echo "== tested under: $$(cut -f1 .venvs/found | tr '\n' ' ')"; \
	[ -z "$$failed" ] || { echo "== failed under:$$failed"; exit 1; }

# Its target is the interpreter: what is there is not built again. PGO=1 has a folder of its own.
FREE := build/python3.14t$(if $(PGO),-pgo)

python3.14t: $(FREE)/bin/python3

$(FREE)/bin/python3:
	$(PYTHON) scripts/free_threaded.py $(FREE) $(if $(PGO),--pgo)

stdlib:
	@mkdir -p .venvs && $(PYTHON) scripts/interpreters.py >.venvs/found
	@failed=; tab=$$(printf '\t'); \
	while IFS="$$tab" read -r version python <&3; do \
	    $(MAKE) --no-print-directory stdlib-one VENV=".venvs/$$version" PYTHON="$$python" 3<&- || failed="$$failed $$version"; \
	done 3<.venvs/found; \
	[ -z "$$failed" ] || { echo "== failed under:$$failed"; exit 1; }

stdlib-one: $(VENV)/.percore-test
	$(RUN) -m tests.stdlib.harness $(STDLIB_ARGS)

clean:
	rm -rf .venv .venvs .cache build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
