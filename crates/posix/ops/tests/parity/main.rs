//! The same program on the kernel and on the stack: each case runs on both, and what the calls say must be the same, word for word.

mod epoll;
mod found;
mod halves;
mod kernel;
mod options;
mod pipes;
mod placeholders;
mod signals;
mod stack;
mod streams;
mod sys;
mod udp;

use stack::Stacks;
use sys::World;

/// Runs a case on both and compares.
fn compare(case: fn(&mut World<'_>)) {
    let kernel = kernel::Kernel;
    let mut on_kernel = World::new(&kernel, &kernel, kernel::ADDRESSES);
    case(&mut on_kernel);
    let stacks = Stacks::start();
    let mut on_stack = World::new(stacks.a(), stacks.b(), stack::ADDRESSES);
    case(&mut on_stack);
    sys::assert_same(&on_kernel.transcript, &on_stack.transcript);
}

/// Makes a test of each case.
macro_rules! cases {
    ($($(#[$doc:meta])* $name:ident)*) => {
        $($(#[$doc])* #[test] fn $name() { crate::compare(super::$name); })*
    };
}
use cases;
