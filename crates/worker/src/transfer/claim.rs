//! A claim to the blocks that another worker holds for us.

use std::time::Duration;

use protocol::handoff::EmbeddedParams;
use tokio_util::task::TaskTracker;

use super::pull;

/// Stands for blocks that a prefill worker holds for this one. Dropped before the blocks have come, whatever the cause (a request that is
/// refused, a client that went away, a pull that failed), it tells the prefill worker to free them.
#[derive(Debug)]
pub(crate) struct Claim {
    params: EmbeddedParams,
    timeout: Duration,
    tasks: TaskTracker,
    open: bool,
}

impl Claim {
    /// A claim to what `params` speak of. A release runs in the background, on `tasks`.
    pub(crate) fn new(params: EmbeddedParams, timeout: Duration, tasks: TaskTracker) -> Self {
        Self {
            params,
            timeout,
            tasks,
            open: true,
        }
    }

    /// What the prefill worker said.
    pub(crate) fn params(&self) -> &EmbeddedParams {
        &self.params
    }

    /// The blocks have come.
    pub(crate) fn fulfilled(&mut self) {
        self.open = false;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        // Without a runtime the process is going down, and the lease must do.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (params, timeout) = (self.params.clone(), self.timeout);
        let release = async move {
            if let Err(error) = pull::release(&params, timeout).await {
                tracing::debug!(request = params.remote_request_id, %error, "the prefill worker's blocks stay until their lease ends");
            }
        };
        self.tasks.spawn_on(release, &runtime);
    }
}
