//! Enums with named variants: for options, for reports, and for the counters of a block.

/// Declares an enum together with the names of its variants. With `counts` and a [unit](crate::family::Unit), each
/// variant also declares a counter, with the variant's doc comment as help.
#[macro_export]
macro_rules! named {
    ($(#[$meta:meta])* $vis:vis enum $name:ident counts $unit:ident {
        $($(#[doc = $help:literal])+ $variant:ident = $word:literal,)*
    }) => {
        $crate::named! {
            $(#[$meta])*
            $vis enum $name {
                $($(#[doc = $help])+ $variant = $word,)*
            }
        }

        impl $name {
            /// The declarations of the counters.
            $vis const COUNTERS: [$crate::family::Description; Self::ALL.len()] = [
                $($crate::family::Description::new(
                    $word,
                    $crate::family::Unit::$unit,
                    $crate::family::Kind::Counter,
                    concat!($($help),+),
                )),*
            ];
        }
    };
    ($(#[$meta:meta])* $vis:vis enum $name:ident { $($(#[$doc:meta])* $variant:ident = $word:expr,)* }) => {
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
