module agentfly.dev/sandboxd

go 1.25
