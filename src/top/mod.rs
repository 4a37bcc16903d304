//! `hotpin top`: a running server in the terminal.
#![forbid(unsafe_code)]

mod client;
mod draw;
mod map;
mod screen;
mod view;
mod wire;

pub use client::{Client, ClientError};
pub use screen::{ScreenError, show};
