//! Compiles C programs with the header and the library of this build.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// A compiled program, which exists as long as this value.
pub struct CProgram {
    folder: tempfile::TempDir,
}

impl CProgram {
    /// Returns the path of the program.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("program")
    }
}

/// Returns the folder of this build's libraries: cargo puts them next to the test.
fn built() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(
        folder.join("libginnel_c.so").exists(),
        "{} has no libginnel_c.so: build it with `cargo test -p ginnel-capi`",
        folder.display()
    );
    folder
}

/// Returns a folder with the libraries of this build as they are installed, where the shared library has its
/// name for the loader.
pub fn library_folder() -> PathBuf {
    static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        for (name, target) in [
            ("libginnel_c.so.0", "libginnel_c.so"),
            ("libginnel_c.so", "libginnel_c.so"),
            ("libginnel_c.a", "libginnel_c.a"),
        ] {
            std::os::unix::fs::symlink(built().join(target), folder.path().join(name)).unwrap();
        }
        folder
    });
    FOLDER.path().to_owned()
}

/// Compiles a source of this crate, or all sources of a folder, to one program.
pub fn compile(source: &str, libraries: &[&str]) -> CProgram {
    let program = CProgram { folder: tempfile::tempdir().unwrap() };
    let tree = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source_path = tree.join(source);
    let sources = match source_path.read_dir() {
        Err(_) => vec![source_path],
        Ok(entries) => entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
            .collect(),
    };
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]);
    cc.arg("-I").arg(tree.join("include")).arg("-o").arg(program.path()).args(sources);
    cc.arg("-L").arg(library_folder()).args(libraries);
    let output = cc.output().expect("cc, a C compiler, runs");
    assert!(output.status.success(), "{source}: {}", String::from_utf8_lossy(&output.stderr));
    program
}
