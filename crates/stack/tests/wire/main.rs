//! Wire formats against two independent implementations, in both directions, and against hostile bytes.

mod etherparse_oracle;
mod hostile;
mod smoltcp_oracle;
mod values;
