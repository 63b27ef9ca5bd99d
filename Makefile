# Perdure: every target makes what it needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check

# The editable install links every file of the package, so a new file or folder makes it stale.
SOURCES := $(wildcard *.py) $(shell find queues deadletter worker integrations -name "*.py" -o -name "*.lua" -o -path "*/dashboard/templates/*.html" -o -path "*/dashboard/static/*.*") $(shell find docs -name "*.md") llms.txt

# Groups of pyproject.toml that are installed with the package.
GROUPS := test check docs

# The tests start hundreds of processes, which would compile the package each time without byte code.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo docs adapters test test-fast test-build test-browser test-python test-wheel dist audit coverage test-system test-cluster test-redis62 failover check format
.PHONY: model replay simulate fuzz bounded evaluate chaos bench bench-scale bench-peers bench-deploys clean

help:
	@printf '%s\n' \
	  'make demo         kill workers of a task on real files, and show that it completes (about 30 s)' \
	  'make test         all tests but those of make test-build, test-browser, simulate and the cluster (about six minutes)' \
	  'make test-browser the pages of the dashboard in Chromium (PERDURE_SCREENSHOTS=1: and the images of docs)' \
	  'make test-fast    the unit tests only, without servers and processes' \
	  'make test-build   the tests of the image, the unit files, the release, the benchmarks, the code in documents and long lives of agents' \
  'make test-python  the unit and conformance tests on another Python: VENV=.venv312 PYTHON=python3.12' \
	  'make test-wheel   the quickstart on the installed wheel, outside of the repository (WHEEL_PYTHONS)' \
	  'make docs         the site of the documentation, in build/site, which works without a network' \
	  'make dist         wheel and source archive of a release (REPOSITORY: its public address)' \
	  'make coverage     all tests with a coverage report (COVERAGE_TESTS)' \
	  'make test-system  the tests that depend on the kind of server, on the redis-server of PATH' \
	  'make test-cluster the tests on a Redis Cluster and under Sentinel' \
	  'make test-redis62 the tests that depend on the kind of server, on Redis 6.2, the oldest supported' \
	  'make check        ruff, mypy --strict, basedpyright, import layers; prints how old the figures of the documents are' \
	  'make format       format the code and sort its imports' \
	  'make model        a thousand random sequences of all scripts, compared with a model (MODEL_SEED, MODEL_RUNS)' \
	  'make replay       stop each handler of a suite at each write, and retry it after each call (REPLAY_SEED)' \
	  'make simulate     the tests of the simulation, and a thousand runs of the whole system under virtual time (SEEDS, SEED)' \
  'make fuzz         ten thousand hostile messages, mutations of all keys, and forgeries of sealed data (FUZZ_SEED, FUZZ_COUNT)' \
	  'make bounded      100,000 tasks of all outcomes, which leave no key in Redis and no memory in the worker' \
	  'make evaluate     measure what agents know over long and interrupted runs, and print the figures (EVALUATE)' \
	  'make failover     kill primaries and move slots under load, and print the outcomes of the tasks' \
	  'make chaos        ten minutes of random faults, and a check of all guarantees against a journal (CHAOS)' \
	  'make adapters     adapters with their frameworks, in an environment each' \
	  'make audit        known vulnerabilities of the packages that users install' \
	  'make bench        throughput, step rate, latency and recovery, compared with a raw client' \
	  'make bench-scale  cost of tasks and idle workers for Redis; writes docs/explanation/scaling.md' \
	  'make bench-peers  comparison with twelve other projects; writes docs/explanation/benchmarks.md and README.md (most of an hour)' \
	  'make bench-deploys deploys of new code under load, with the commands of systemd, Kubernetes, compose and PM2' \
	  'make install      create .venv with all dependencies; the other targets call it' \
	  'make clean        remove .venv and all build products'

install: $(VENV)/installed

$(VENV)/python-ready:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'pip>=25.1' 'setuptools>=77' wheel
	@touch $@

$(VENV)/dependencies: pyproject.toml $(VENV)/python-ready
	$(PIP) install --quiet $(GROUPS:%=--group %)
	$(PIP) install --quiet --no-build-isolation --config-settings editable_mode=strict --editable '.[embedded,metrics,cron,prices,encryption,artifacts,vectors,postgres,embeddings,web,otel,reload]'
	@touch $@

$(VENV)/installed: $(VENV)/dependencies $(SOURCES)
	@$(PIP) install --quiet --no-build-isolation --no-deps --config-settings editable_mode=strict --editable .
	@touch $@

demo: install
	$(BIN)/perdure demo

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo 'the site begins at build/site/index.html'

# Tests of one file stay in one process; each process has servers of its own. Half of the time a test waits for another
# process, so there are two processes per core. The order of the files is that of tests/conftest.py.
PARALLEL ?= 4
PYTEST = $(BIN)/python -m pytest -n $(PARALLEL) --dist loadfile --no-loadscope-reorder --max-worker-restart=2
UNLIMITED := -o timeout=0 -o faulthandler_timeout=0

# What is built, measured and documented with the package, which takes long and changes seldom.
BUILT := tests/benchmarks tests/evaluation $(addprefix tests/project/,test_deploy.py test_deploy_tools.py test_dist.py test_docs_code.py test_site.py)

# Whether the simulation sees each defect that is planted into it: as long as all other unit tests together.
SIMULATED := tests/simulation/fleet tests/simulation/sensitivity

test: install
	$(PYTEST) $(BUILT:%=--ignore=%) $(SIMULATED:%=--ignore=%)

# PM2 runs one of the files of deploy/. Its tests are left out where npm cannot install it.
build/npm/installed:
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then timeout 120 npm install --silent --fetch-retries=1 --fetch-timeout=20000 --no-audit --no-fund --prefix $(@D) pm2@7 || echo 'could not install pm2'; fi
	@touch $@

test-build: install build/npm/installed
	$(PYTEST) $(BUILT)

test-fast: install
	$(PYTEST) -m 'not integration and not processes and not cluster and not evaluation and not browser'

# Each process has a browser of its own.
test-browser: PARALLEL = 2
test-browser: install
	$(PYTEST) -m browser tests/worker/dashboard

# What is the same on every Python: the texts of the repository, the model and the simulation, and conformance on fakeredis.
SAME_ON_EVERY_PYTHON := --ignore=tests/model --ignore=tests/simulation \
  $(addprefix --ignore=tests/project/,test_deploy_tools.py test_docs.py test_fundamentals.py test_language.py test_layers.py) -k 'not [fake'

# On another Python: make test-python VENV=.venv312 PYTHON=python3.12. REDIS_PY: a release of redis-py instead of the latest.
test-python: GROUPS = test
test-python: install
	@$(if $(REDIS_PY),$(PIP) install --quiet 'redis[hiredis]==$(REDIS_PY)')
	$(BIN)/python --version
	$(BIN)/python -c 'import redis; print("redis-py", redis.__version__)'
	$(PYTEST) -m 'conformance or not (integration or processes or cluster or evaluation or browser)' $(SAME_ON_EVERY_PYTHON)

# WHEEL_PYTHONS: the interpreters that the wheel is installed for.
test-wheel: WHEEL_PYTHONS ?= $(PYTHON)
test-wheel: install
	$(BIN)/python -m tests.project.wheel $(WHEEL_PYTHONS)

# AT: newest, lowest or both; ADAPTERS: their names, all by default.
adapters: AT ?= newest
adapters: install
	$(BIN)/python -m tests.adapters --at $(AT) $(ADAPTERS)

# The package index needs absolute links, so without an address nothing is built.
# Figures of a tree without a commit cannot be repeated, so a release has none.
dist: install
	@$(BIN)/python -m benchmarks.figures --release
	$(PIP) install --quiet --group release
	@$(BIN)/python .ci/dist.py '$(REPOSITORY)'
	@$(BIN)/python .ci/sbom.py dist/perdure-*.whl dist/perdure.cdx.json

# Exit code 3: the advisory database does not answer here.
audit: install
	@$(PIP) install --quiet --group release
	@$(BIN)/python .ci/audit.py

# COVERAGE_TESTS: which of them, as pytest's -m takes it.
coverage: COVERAGE_TESTS ?= not cluster and not evaluation and not browser
coverage: install
	@rm -f build/coverage*
	$(PYTEST) -m '$(COVERAGE_TESTS)' --cov --cov-report=
	$(BIN)/coverage report

# On another server than the bundled Valkey: the conformance suite and the tests of what depends on the kind of server.
ELSEWHERE := -m '(conformance or integration and not processes) and not cluster and not evaluation and not browser' \
  tests/conformance tests/fundamentals tests/model tests/system tests/topology

test-system: install
	PERDURE_TEST_SERVER=system $(PYTEST) $(ELSEWHERE)

test-redis62: install
	$(PIP) install --quiet --group redis62
	PERDURE_TEST_SERVER=redis62 $(PYTEST) $(ELSEWHERE)

# Each process starts clusters of its own, of six nodes and more.
test-cluster: PARALLEL = 2
test-cluster: install
	$(PYTEST) -m cluster

# The type checkers share nothing and take longest, so they run at the same time.
check: install
	@$(MAKE) --no-print-directory --jobs 2 --output-sync check-mypy check-pyright check-style
	@echo 'figures of the documents, how old they are:'
	@$(BIN)/python -m benchmarks.figures

.PHONY: check-mypy check-pyright check-style
check-mypy:
	$(BIN)/mypy -p perdure
	$(BIN)/mypy -p benchmarks
	$(BIN)/mypy tests deploy/app.py examples

check-pyright:
	$(BIN)/basedpyright

check-style:
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

model: export MODEL_RUNS ?= 1000
model: export MODEL_ACTS ?= 60
model: export MODEL_SEED ?= $(shell $(PYTHON) -c 'import secrets; print(secrets.randbelow(2**32))')
model: install
	$(BIN)/python -m pytest tests/model -rfEP $(UNLIMITED)

# REPLAY_SEED: chooses where processes are killed.
replay: export REPLAY = all
replay: install
	$(PYTEST) --dist load --maxschedchunk 1 tests/replay $(UNLIMITED)

# SEEDS: number of runs; SEED: the first one. One run: python -m tests.simulation --seed N
simulate: SEEDS ?= 1000
simulate: SEED ?= 0
simulate: install
	$(PYTEST) $(SIMULATED)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS) --start $(SEED)

# FUZZ_ONLY: numbers of the mutations or forgeries that are applied, as a failure names them.
fuzz: export FUZZ_COUNT ?= 10000
fuzz: export FUZZ_SEED ?= $(shell $(PYTHON) -c 'import secrets; print(secrets.randbelow(2**32))')
fuzz: install
	$(BIN)/python -m pytest tests/fuzz -rfEP --show-capture=stdout $(UNLIMITED)

bounded: export BOUNDED_TASKS ?= 100000
bounded: install
	$(BIN)/python -m pytest tests/system/test_bounded.py -rfEP $(UNLIMITED)

# EVALUATE: options of pytest, such as EVALUATE='-k prompts'.
# PROMPT_SCHEDULES: crashes of the prompts of a resumed agent; the default run has 40.
evaluate: export PROMPT_SCHEDULES ?= 200
evaluate: install
	$(BIN)/python -m pytest tests/evaluation -m evaluation -n 0 -s $(UNLIMITED) $(EVALUATE)

failover: install
	$(BIN)/python -m tests.topology.failover

# CHAOS: options of the run, such as CHAOS='--seconds 60 --seed 7'; see tests/chaos/README.md.
chaos: install
	$(BIN)/python -m tests.chaos $(CHAOS)

bench: install
	$(BIN)/python -m benchmarks

# DEPLOYS: options of `python -m benchmarks.deploys`.
bench-deploys: install build/npm/installed
	PATH="$(CURDIR)/build/npm/node_modules/.bin:$$PATH" $(BIN)/python -m benchmarks.deploys $(DEPLOYS)

bench-scale: install
	$(BIN)/python -m benchmarks.scale --write docs/explanation/scaling.md

# Into build/ first, so that the stored figures stay until the new ones are complete. What the peers run does not measure,
# because of --only, stays as it was.
# BENCH_PEERS: options of `python -m benchmarks.peers`; --quick is for all three runs.
bench-peers: install
	@mkdir -p docs/explanation/benchmarks build
	$(BIN)/python -m benchmarks --json $(filter --quick,$(BENCH_PEERS)) > build/perdure.json
	$(BIN)/python -m benchmarks --json --fsync --only steps $(filter --quick,$(BENCH_PEERS)) > build/perdure-fsync.json
	$(BIN)/python -m benchmarks.peers $(BENCH_PEERS)
	@mv build/perdure.json build/perdure-fsync.json docs/explanation/benchmarks/
	$(BIN)/python -m benchmarks.peers.page

clean:
	rm -rf $(VENV) build perdure.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
