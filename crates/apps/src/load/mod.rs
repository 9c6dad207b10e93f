//! `ginnel load http`.

pub mod arrivals;
pub mod plan;
pub mod response;
pub mod session;
pub mod sources;
pub mod stats;
pub mod urls;
