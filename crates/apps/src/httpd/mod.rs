//! `ginnel httpd`: a server of static files.

pub mod body;
pub mod conditional;
pub mod head;
pub mod path;
pub mod range;
pub mod status;
pub mod types;
