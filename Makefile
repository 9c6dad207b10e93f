# `make demo`, `make check` and `make test` set up what they need themselves.

.DEFAULT_GOAL := help
.PHONY: demo check test lint fuzz-smoke suites soak bench instructions deb help

demo: ## compare unmodified nginx and redis on the kernel and on Ginnel, in less than a minute (no root needed)
	@scripts/demo

check: ## formatting, clippy, the engine and POSIX operations in virtual time: two minutes, for daily work
	@scripts/check

test: ## all tests but the long ones
	@scripts/test

lint: ## formatting, clippy, documentation, dependencies, shell scripts
	@scripts/lint

fuzz-smoke: ## every fuzz target for FUZZ_SECONDS seconds (default 60), two at a time
	@scripts/fuzz $(or $(FUZZ_SECONDS),60)

suites: ## the long tests: GiB transfers, all seeds, all scripts in real time (more than an hour)
	@scripts/test --long

soak: ## an hour of traffic with faults, memory watched: make soak SOAK=seconds
	@scripts/soak $(SOAK)

bench: ## paired measurements, alone on the machine: make bench BENCH=name (default: all), ARGS=--smoke to try it
	@scripts/bench $(BENCH) $(ARGS)

instructions: ## counts instructions per connection, request and megabyte; fails on 2 % more than bench/instructions.json
	@scripts/setup valgrind
	@scripts/bench instructions

deb: ## a Debian package of the release build, in target/deb
	@scripts/setup dpkg-dev binutils
	@scripts/deb

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'
