//! What a status code means.
