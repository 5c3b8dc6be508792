"""Where the operator acts: watches, loops, writes, the leader's lease, the web page for monitors."""
