//! `ginnel httpd`: a server of static files.

mod answer;
pub mod body;
pub mod busy;
pub mod conditional;
pub mod head;
pub mod path;
pub mod range;
pub mod response;
pub mod server;
pub mod site;
pub mod status;
pub mod types;
