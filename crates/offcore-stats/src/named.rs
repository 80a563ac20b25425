//! Enums with named variants: for options, for reports, and for the counters of a block.

/// Declares an enum together with the names of its variants, which can be used as the counter names of a
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
            /// The names of the variants, in the same order.
            $vis const NAMES: [&'static str; [$($word),*].len()] = [$($word),*];

            /// Returns the name, as used in options and reports.
            #[inline]
            $vis const fn name(self) -> &'static str {
                Self::NAMES[self as usize]
            }

            /// Returns the variant with this name.
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

/// Concatenates the names of `a` and `b`, `N` in total.
///
/// # Panics
/// If the total is not `N`.
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
