//! The counters of a worker. Only its thread writes them; the thread that prints the report reads them.

use core::sync::atomic::{AtomicU64, Ordering};

/// A counter that only one thread changes.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`. Only the worker's thread may call this: load and store are two steps.
    pub fn add(&self, count: u64) {
        self.0.store(self.get().wrapping_add(count), Ordering::Relaxed);
    }

    /// Subtracts one.
    pub fn decrement(&self) {
        self.0.store(self.get().wrapping_sub(1), Ordering::Relaxed);
    }

    /// Returns the count.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one worker.
        #[derive(Debug, Default)]
        pub struct WorkerCounters {
            $($(#[$doc])* pub $name: Counter,)*
        }

        /// The values of [`WorkerCounters`] at one time.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct WorkerCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl WorkerCounters {
            /// Returns the values.
            pub fn counts(&self) -> WorkerCounts {
                WorkerCounts { $($name: self.$name.get(),)* }
            }
        }

        impl WorkerCounts {
            /// Returns names and values.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }

            /// Returns names, with the prefix of the program, and values, for `ginnel stat`.
            pub(super) fn stat_items(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((concat!("demo_server.", stringify!($name)), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Connections that clients opened.
    connections,
    /// Requests whose heads have arrived.
    requests,
    /// Responses that were passed to the stack completely, errors included.
    responses,
    /// Responses that this server made because a request was malformed or a backend failed.
    errors,
    /// Connections of clients that are open now.
    open,
    /// Connections to backends that were begun.
    backend_connects,
    /// Connections to backends that failed, or ended before their response did.
    backend_failures,
    /// Connections that were reset because nothing happened on them for too long.
    timeouts,
    /// Connections that the kernel did not hand over, for example for lack of descriptors.
    accept_failures,
}

#[cfg(test)]
mod tests {
    use super::WorkerCounters;

    #[test]
    fn counts_are_listed_by_name() {
        let counters = WorkerCounters::default();
        counters.requests.add(3);
        counters.open.add(2);
        counters.open.decrement();
        let counts = counters.counts();
        assert_eq!((counts.requests, counts.open), (3, 1));
        let listed: Vec<_> = counts.iter().filter(|(_, count)| *count > 0).collect();
        assert_eq!(listed, [("requests", 3), ("open", 1)]);
        assert!(counts.stat_items().all(|(name, _)| name.starts_with("demo_server.")));
    }
}
