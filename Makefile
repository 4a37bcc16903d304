# Two commands: `make demo` shows the whole thing, `make test` passes every test. Both install what
# they need on Debian (as root) and keep what is slow to make in a cache folder outside the clone.

CACHE          ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hotpin
export CARGO_TARGET_DIR := $(or $(HOTPIN_TARGET_DIR),$(CACHE)/target)
MODELS         := $(CACHE)/models
DENSE          := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO           := $(MODELS)/demo-32x4-q4_0.gguf
LARGE          := $(MODELS)/demo-64x4-q8_0.gguf
TINY           := $(MODELS)/test-8x2-q4_0.gguf
export HOTPIN  := $(CARGO_TARGET_DIR)/release/hotpin
export OUT     ?= out
WASM           := wasm32-unknown-unknown
PREFIX         ?= /usr/local

.PHONY: all help setup toolchain build install dense model large tiny demo test loom miri sanitize fuzz guest portable \
	lint wasm deny bench gpu test-gpu gpu-check lint-gpu clean
# The targets share one cargo folder and one machine: cargo uses all cores by itself.
.NOTPARALLEL:

all: build

help:
	@echo "make demo   build, make a demo MoE model, run it in 45% of its size under four policies"
	@echo "make test   every test"
	@echo "make lint   fmt, clippy, doc warnings, wasm build of the controllers"
	@echo "make loom, miri, sanitize, fuzz, guest   what takes other tools: docs/reliability.md"
	@echo "make portable   the programs for any x86-64 with SSE 4.2, slower, in $(CARGO_TARGET_DIR)/portable"
	@echo "make deny   licences and sources of the dependencies (needs cargo-deny)"
	@echo "make build  the programs alone, in $(CARGO_TARGET_DIR)/release"
	@echo "make install  build, and copy the programs to $(PREFIX)/bin"
	@echo "make large  the 5.5 GB model of the longer benchmark"
	@echo "make bench  the longer benchmark on it"
	@echo "make gpu    the programs with Vulkan; make test-gpu its tests, make gpu-check a table of what a card does"
	@echo "make clean  remove $(OUT)/; the cache $(CACHE) stays"

setup:
	@scripts/setup.sh
	@scripts/own-target.sh "$(CARGO_TARGET_DIR)"

build: setup
	cargo build --release --workspace
	@echo "hotpin: $(HOTPIN)"

install: build
	install -D -m 755 -t "$(DESTDIR)$(PREFIX)/bin" "$(HOTPIN)" "$(CARGO_TARGET_DIR)/release/hotpin-sim"

dense: setup
	@scripts/fetch-dense.sh "$(DENSE)"

# Each model is made again when its builder, its texts or its options have changed.
model: build dense
	@scripts/demo-model.sh "$(DEMO)" "$(DENSE)" --experts 32 --top-k 4 --quant q4_0 --seed 1

large: build dense
	@scripts/demo-model.sh "$(LARGE)" "$(DENSE)" --experts 64 --top-k 4 --quant q8_0 --seed 1

tiny: build dense
	@scripts/demo-model.sh "$(TINY)" "$(DENSE)" --experts 8 --top-k 2 --quant q4_0 --seed 1

# Experts in a graphics card's memory: llama.cpp is built anew with Vulkan, which takes minutes. Where the
# system's Vulkan headers are too old, newer ones are unpacked into the cache and named to the compiler.
HEADERS        := $(CACHE)/vulkan-headers
WITH_HEADERS    = CPATH="$$(scripts/setup-gpu.sh "$(HEADERS)")$${CPATH:+:$$CPATH}"

gpu: setup
	$(WITH_HEADERS) cargo build --release --workspace --features vulkan

# Mesa's software device counts only when it is named.
test-gpu: setup
	$(WITH_HEADERS) GGML_VK_VISIBLE_DEVICES="$${GGML_VK_VISIBLE_DEVICES:-0}" \
		cargo test --release --features vulkan --test gpu -- --nocapture --test-threads 1

gpu-check:
	@scripts/gpu-check.sh

# What `lint` does not see without Vulkan's headers.
lint-gpu: setup toolchain
	$(WITH_HEADERS) cargo clippy --release --workspace --all-targets --features vulkan -- -D warnings

demo: model
	@scripts/demo.sh "$(DEMO)"

bench: large
	@scripts/bench-large.sh "$(LARGE)"

test: tiny build
	HOTPIN_TEST_DENSE="$(DENSE)" HOTPIN_TEST_MOE="$(TINY)" \
		cargo test --release --workspace --no-fail-fast
	@scripts/test-clients.sh "$(TINY)" "$(CACHE)/clients"
	@scripts/test-dashboard.sh "$(TINY)" "$(CACHE)/browser" "$(OUT)"

# Every order in which the threads of engine and governor may go on, over the real stores.
loom: setup
	cargo test --release --features loom --lib -- --nocapture --test-threads 1 orders::

# The control laws and the bookkeeping of pages in an interpreter that knows undefined behaviour. Tests that
# repeat themselves do so less often there, and those that need hundreds of tokens are left out.
miri: setup
	@scripts/miri.sh "$(CARGO_TARGET_DIR)"

# What valgrind and emulated processors can run: llama.cpp not for this processor, which takes minutes to build.
PORTABLE := $(CARGO_TARGET_DIR)/portable
portable: setup
	cargo build --release --no-default-features --target-dir "$(PORTABLE)"

# The whole program under valgrind: what llama.cpp and our calls into it do with memory.
sanitize: tiny portable
	@HOTPIN="$(PORTABLE)/release/hotpin" scripts/sanitize.sh "$(TINY)" "$(OUT)"

# Each reader of files for FUZZ_S seconds, from what is in fuzz/corpus; what was found is kept in the cache.
FUZZ_S ?= 60
fuzz: setup
	@scripts/fuzz.sh "$(FUZZ_S)" "$(CACHE)/fuzz"

# Faults where cgroups are of version 2 alone and the clock may be set: in a small virtual machine.
guest: portable
	@HOTPIN="$(PORTABLE)/release/hotpin" CARGO_TARGET_DIR="$(PORTABLE)" scripts/guest-tests.sh "$(CACHE)/guest"

lint: setup toolchain wasm
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps

# rustfmt and clippy are not part of a minimal toolchain.
toolchain:
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || \
		{ command -v rustup >/dev/null 2>&1 && rustup component add rustfmt clippy; } || \
		{ echo "lint: rustfmt or clippy is missing; 'rustup component add rustfmt clippy' adds them" >&2; exit 1; }

# That the controllers build for a target without clock, files and threads proves that they use none.
wasm: setup
	@test -d "$$(rustc --print sysroot)/lib/rustlib/$(WASM)" || \
		{ command -v rustup >/dev/null 2>&1 && rustup target add $(WASM); } || \
		{ echo "wasm: this toolchain has no $(WASM) target; 'rustup target add $(WASM)' adds it" >&2; exit 1; }
	cargo build --release --target $(WASM) -p hotpin-controllers

# Not part of lint: building cargo-deny takes minutes, so it is used where it is there.
deny:
	@command -v cargo-deny >/dev/null 2>&1 || \
		{ echo "deny: cargo-deny is missing; 'cargo install --locked cargo-deny' installs it" >&2; exit 1; }
	cargo deny check

clean:
	rm -rf "$(OUT)"
