//! Tests wire formats against two independent implementations, in both directions, and with hostile bytes.

mod etherparse_oracle;
mod hostile;
mod smoltcp_oracle;
mod values;
