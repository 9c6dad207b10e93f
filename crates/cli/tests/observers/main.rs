//! Commands that look at a running stack from outside.

mod capture;
mod metrics;
mod top;
mod web_stack;
