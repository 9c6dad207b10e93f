//! Commands that look at a running stack from outside.

mod capture;
mod metrics;
mod web_stack;
