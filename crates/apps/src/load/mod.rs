//! `ginnel load http`.

pub mod arrivals;
pub mod response;
pub mod sources;
pub mod urls;
