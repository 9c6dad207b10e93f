//! `ginnel iot` with a real redis-server, over a memory cable, in real time.

mod cluster;
mod failures;
mod fixture;
mod many;
mod messages;
mod placements;
