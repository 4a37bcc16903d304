//! A tiny model of every MoE architecture that llama.cpp runs, with random weights, and what is shown
//! on each: that it loads, that the tap sees every routed expert, that the stores hold the tensors'
//! own bytes, and that logits are those of llama.cpp alone, bit for bit.

mod architectures;
mod blueprint;
mod check;
mod make;
mod perplexity;
pub mod plain;
mod rows;
mod table;
mod variants;
mod weights;
