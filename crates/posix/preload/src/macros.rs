//! Macros that define the functions which C calls.

/// Defines hooks of functions whose first argument is a descriptor. A hook runs its body if the descriptor
/// belongs to the stack, and otherwise calls libc's function with the same arguments:
/// `hook! { fn listen(fd: c_int, backlog: c_int) -> c_int = |ops| ops.listen(fd, backlog); }`.
macro_rules! hook {
    ($(
        fn $name:ident($fd:ident: c_int $(, $argument:ident: $type:ty)* $(,)?) -> $result:ty
            = |$ops:ident| $body:expr;
    )*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($fd: c_int $(, $argument: $type)*) -> $result {
            match $crate::hooks::stack_ops($fd) {
                Some($ops) => ginnel_posix_ops::ffi::IntoC::into_c($body),
                // SAFETY: the program's arguments, unchanged.
                None => unsafe { $crate::real::$name($fd $(, $argument)*) },
            }
        }
    )* };
}

/// Defines other names of hooks:
/// `alias! { fn __send = send(fd: c_int, …) -> ssize_t; }`.
macro_rules! alias {
    ($(fn $alias:ident = $function:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $alias($($argument: $type),*) -> $result {
            // SAFETY: the program's arguments, unchanged.
            unsafe { $function($($argument),*) }
        }
    )* };
}
