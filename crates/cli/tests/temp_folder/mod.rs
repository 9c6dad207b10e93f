//! The directory of a test.

use std::path::PathBuf;

/// A directory with a site of two files, removed when the value is dropped.
pub struct TempFolder(pub PathBuf);

impl TempFolder {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("ginnel-{name}-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("site")).unwrap();
        std::fs::write(folder.join("site/index.html"), "<p>here</p>").unwrap();
        std::fs::write(folder.join("site/large.bin"), vec![b'x'; 1 << 20]).unwrap();
        Self(folder)
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
