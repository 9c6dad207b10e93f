//! Gives the shared library its name for the loader. The number changes with its interface.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libginnel_c.so.0");
    println!("cargo::rerun-if-changed=build.rs");
}
