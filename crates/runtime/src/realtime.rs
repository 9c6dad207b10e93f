//! Real-time priority of a thread.
#![allow(unsafe_code)] // Reason: sched_setscheduler(2) is only reachable through an unsafe function.

use std::io;

/// Gives the calling thread the lowest real-time priority, or takes it away. Threads that it starts do not
/// inherit it.
///
/// # Errors
/// Returns an error if it is not permitted (`CAP_SYS_NICE`, or a resource limit `RLIMIT_RTPRIO` of 1), or if
/// the thread has another scheduling policy, which it keeps.
pub(crate) fn set_realtime(on: bool) -> io::Result<()> {
    let (from, to, priority) =
        if on { (libc::SCHED_OTHER, libc::SCHED_RR, 1) } else { (libc::SCHED_RR, libc::SCHED_OTHER, 0) };
    // SAFETY: reads the policy of the calling thread (0), and accesses no memory of this process.
    let policy = unsafe { libc::sched_getscheduler(0) };
    if policy < 0 {
        return Err(io::Error::last_os_error());
    }
    if policy & !libc::SCHED_RESET_ON_FORK != from {
        return Err(io::Error::other("the thread has another scheduling policy"));
    }
    let parameters = libc::sched_param { sched_priority: priority };
    // SAFETY: concerns the calling thread (0) alone; the parameters are read during the call.
    let result = unsafe { libc::sched_setscheduler(0, to | libc::SCHED_RESET_ON_FORK, &parameters) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::set_realtime;

    /// Returns the policy of the calling thread from /proc.
    fn policy() -> u32 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        // The second field is the name, which may contain spaces; the policy is the 41st field.
        let fields = &stat[stat.rfind(')').unwrap() + 2..];
        fields.split(' ').nth(38).unwrap().parse().unwrap()
    }

    #[test]
    fn priority_is_granted_and_returned_or_refused() {
        std::thread::spawn(|| {
            if let Err(refused) = set_realtime(true) {
                assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
                assert_eq!(policy(), 0);
                return;
            }
            assert_eq!(policy(), 2, "SCHED_RR");
            assert!(set_realtime(true).is_err(), "the thread has it already");
            std::thread::spawn(|| assert_eq!(policy(), 0, "not inherited")).join().unwrap();
            set_realtime(false).unwrap();
            assert_eq!(policy(), 0);
            // Once more, for the next time it wakes.
            set_realtime(true).unwrap();
        })
        .join()
        .unwrap();
    }
}
