//! The integration tests.

mod demo_model;
