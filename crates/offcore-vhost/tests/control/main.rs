//! The control plane of the vhost-user back end and front end, over real sockets.

mod hostile;
mod lifecycle;
mod own_front_end;
mod peer;
mod sequences;
