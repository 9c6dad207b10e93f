//! How often the shards of a stack were started again: a file in the stack's directory, which the supervisor
//! writes, so that the number outlives the shards.

use std::fs;
use std::io;
use std::path::Path;

const FILE: &str = "restarts";
const NEW_FILE: &str = ".restarts.new";

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
        fs::write(folder.join(FILE), "none").unwrap();
        assert_eq!(count(&folder), 0);
        fs::remove_dir_all(&folder).unwrap();
        assert!(record(&folder, 1).is_err());
    }
}
