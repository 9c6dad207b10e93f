//! At every limit of the configuration what is documented happens and is counted, and afterwards everything goes on. One file per area.

mod buffers;
mod common;
mod connections;
mod devices;
mod fragments;
mod half_open;
mod links;
mod listeners;
mod neighbours;
mod out_of_order;
mod replies;
mod reports;
mod time_wait;
mod udp;
