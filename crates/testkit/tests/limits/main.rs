//! At every limit of the configuration the documented behaviour occurs and is counted, and afterwards the
//! stack recovers. One file per area.

mod buffers;
mod common;
mod connections;
mod devices;
mod fragments;
mod half_open;
mod held_syns;
mod links;
mod listeners;
mod neighbours;
mod out_of_order;
mod replies;
mod reports;
mod time_wait;
mod udp;
