//! Stacks that several programs use (`ginnel up`, `down`, `run --stack`), and programs that talk to themselves and to each other inside a stack.

mod inside;
mod lives;
mod rig;
