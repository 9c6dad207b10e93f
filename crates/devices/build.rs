//! Compiles the shim between the DPDK device and DPDK's libraries, if the feature `dpdk` is on.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "dpdk")]
    dpdk::build();
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::process::Command;

    const SHIM: &str = "src/dpdk/shim.c";
    /// Libraries whose functions the shim calls. They load the drivers at run time.
    const LIBRARIES: [&str; 4] = ["rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal"];

    pub fn build() {
        println!("cargo::rerun-if-changed={SHIM}");
        println!("cargo::rerun-if-env-changed=PKG_CONFIG_PATH");
        let flags = pkg_config(&["--cflags"]);
        let mut compiler = cc::Build::new();
        // Threads that EAL did not start register by functions that 22.11 still calls experimental.
        compiler.define("ALLOW_EXPERIMENTAL_API", None);
        compiler.file(SHIM).warnings(true).flag_if_supported("-Wno-deprecated-declarations");
        for flag in flags.split_whitespace() {
            compiler.flag(flag);
        }
        compiler.compile("ginnel_dpdk_shim");
        for path in pkg_config(&["--libs-only-L"]).split_whitespace() {
            println!("cargo::rustc-link-search=native={}", path.trim_start_matches("-L"));
        }
        for library in LIBRARIES {
            println!("cargo::rustc-link-lib=dylib={library}");
        }
    }

    /// Asks pkg-config about DPDK. Ends the build with what is missing if DPDK is not installed.
    fn pkg_config(arguments: &[&str]) -> String {
        let asked = Command::new("pkg-config").args(arguments).arg("libdpdk >= 22.11").output();
        let output = match asked {
            Ok(output) => output,
            Err(error) => fail(&format!("pkg-config cannot be run ({error}): apt-get install pkgconf")),
        };
        if !output.status.success() {
            let reason = String::from_utf8_lossy(&output.stderr);
            let reason = reason.trim().lines().last().unwrap_or_default();
            fail(&format!("DPDK 22.11 or later is missing: apt-get install libdpdk-dev ({reason})"));
        }
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn fail(problem: &str) -> ! {
        println!("cargo::error=feature \"dpdk\": {problem}");
        std::process::exit(1);
    }
}
