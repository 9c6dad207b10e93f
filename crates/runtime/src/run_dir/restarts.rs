//! How often the shards of a stack were started again, and that they could not be: files in the stack's
//! directory, which the supervisor writes, so that they outlive the shards.

use std::fs;
use std::io;
use std::path::Path;

const FILE: &str = "restarts";
const NEW_FILE: &str = ".restarts.new";
const FAILED_FILE: &str = "not-restarted";

/// Records in the directory of a stack that its shards were started again `count` times.
///
/// # Errors
/// The directory cannot be written.
pub fn record(directory: &Path, count: u64) -> io::Result<()> {
    let new = directory.join(NEW_FILE);
    fs::write(&new, format!("{count}\n"))?;
    // Readers see either number.
    fs::rename(&new, directory.join(FILE))
}

/// Returns how often the shards of the stack with this directory were started again without their state. Zero
/// if nothing is recorded.
pub fn count(directory: &Path) -> u64 {
    let text = fs::read_to_string(directory.join(FILE)).unwrap_or_default();
    text.trim().parse().unwrap_or_default()
}

/// Records in the directory of a stack whether its last shards have died and could not be started again.
///
/// # Errors
/// The directory cannot be written.
pub fn record_failed(directory: &Path, failed: bool) -> io::Result<()> {
    let path = directory.join(FAILED_FILE);
    match failed {
        true => fs::write(path, ""),
        false => fs::remove_file(path).or_else(|e| match e.kind() {
            io::ErrorKind::NotFound => Ok(()),
            _ => Err(e),
        }),
    }
}

/// Returns true if the shards of the stack with this directory do not run, because they could not be started
/// again. The supervisor goes on trying.
pub fn has_failed(directory: &Path) -> bool {
    directory.join(FAILED_FILE).exists()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_counts() {
        let folder = std::env::temp_dir().join(format!("ginnel-restarts-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        assert_eq!(count(&folder), 0);
        for recorded in [1, 2, u64::MAX] {
            record(&folder, recorded).unwrap();
            assert_eq!(count(&folder), recorded);
        }
        for failed in [false, true, true, false, false] {
            record_failed(&folder, failed).unwrap();
            assert_eq!(has_failed(&folder), failed);
        }
        fs::write(folder.join(FILE), "none").unwrap();
        assert_eq!(count(&folder), 0);
        fs::remove_dir_all(&folder).unwrap();
        assert!(record(&folder, 1).is_err());
    }
}
