# Two commands: `make demo` shows the whole thing, `make test` passes every test. Both install what
# they need on Debian (as root) and keep what is slow to make in a cache folder outside the clone.

CACHE          ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hotpin
export CARGO_TARGET_DIR := $(or $(HOTPIN_TARGET_DIR),$(CACHE)/target)
MODELS         := $(CACHE)/models
DENSE          := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO           := $(MODELS)/demo-32x4-q4_0.gguf
LARGE          := $(MODELS)/demo-64x4-q8_0.gguf
TINY           := $(MODELS)/test-8x2-q4_0.gguf
HOTPIN         := $(CARGO_TARGET_DIR)/release/hotpin
OUT            ?= out

.PHONY: all setup build model demo test lint wasm bench large clean help

all: build

help:
	@echo "make demo   build, make a demo MoE model, run it in 45% of its size under four policies"
	@echo "make test   every test"
	@echo "make lint   fmt, clippy, doc warnings, wasm build of the controllers, licences"
	@echo "make large  the 5.5 GB model of the longer benchmarks"
	@echo "make bench  the longer benchmark on it"

setup:
	@scripts/setup.sh

build: setup
	cargo build --release --workspace

$(DENSE): | setup
	@scripts/fetch-dense.sh "$(DENSE)"

# A model is remade only when it is missing: it depends on the program's existence, not its date.
$(DEMO): $(DENSE) | build
	$(HOTPIN) demo model --from $(DENSE) --experts 32 --top-k 4 --quant q4_0 --seed 1 -o $@

$(LARGE): $(DENSE) | build
	$(HOTPIN) demo model --from $(DENSE) --experts 64 --top-k 4 --quant q8_0 --seed 1 -o $@

$(TINY): $(DENSE) | build
	$(HOTPIN) demo model --from $(DENSE) --experts 8 --top-k 2 --quant q4_0 --seed 1 -o $@

model: $(DEMO)

large: $(LARGE)

demo: build $(DEMO)
	@HOTPIN="$(HOTPIN)" OUT="$(OUT)" scripts/demo.sh "$(DEMO)"

test: build $(TINY)
	HOTPIN_TEST_DENSE="$(DENSE)" HOTPIN_TEST_MOE="$(TINY)" \
		cargo test --release --workspace

lint: setup
	cargo fmt --all --check
	cargo clippy --release --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --release --workspace --no-deps
	$(MAKE) wasm

wasm: setup
	cargo build --release --target wasm32-unknown-unknown -p hotpin-controllers

bench: build $(LARGE)
	@HOTPIN="$(HOTPIN)" OUT="$(OUT)" scripts/bench-large.sh "$(LARGE)"

clean:
	rm -rf "$(OUT)"
