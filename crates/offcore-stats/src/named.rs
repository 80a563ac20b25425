//! Enums whose variants have names: for options, for reports, and for the counters of a block.

/// Declares an enum once with the names of its variants, which may number the counters of a
/// [`Block`](crate::page::Block).
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        $vis enum $name {
            $($(#[$doc])* $variant,)*
        }

        #[allow(dead_code, reason = "not every enum needs every one")]
        impl $name {
            /// Every variant, in order.
            $vis const ALL: [Self; [$($word),*].len()] = [$(Self::$variant),*];
            /// Their names, in the same order.
            $vis const NAMES: [&'static str; [$($word),*].len()] = [$($word),*];

            /// The name, as options and reports have it.
            #[inline]
            $vis const fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }

            /// The variant of that name.
            $vis fn find(name: &str) -> Option<Self> {
                Self::ALL.into_iter().find(|variant| variant.name() == name)
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

/// The names of `a`, then those of `b`, `N` in all.
///
/// # Panics
/// When there are not `N`.
pub const fn joined<const A: usize, const B: usize, const N: usize>(
    a: [&'static str; A],
    b: [&'static str; B],
) -> [&'static str; N] {
    assert!(A + B == N, "as many names as there are in both");
    let (mut all, mut i) = ([""; N], 0);
    while i < N {
        all[i] = if i < A { a[i] } else { b[i - A] };
        i += 1;
    }
    all
}
