package main

import (
	"net"
	"os"
	"time"
)

const (
	shutPause = 50 * time.Millisecond
	// What drops packets says nothing; what answers does so within a node, or the next one.
	shutPatience = 300 * time.Millisecond
	// One failure may be the API server's.
	shutFailures = 2
)

// awaitShut waits until what enforces network policies knows this pod: most learn its address after its start, and
// let its first packets pass. It asks for the API server, which no sandbox is to reach, and says whether it is out of
// reach.
func awaitShut(connect func() error, within time.Duration) bool {
	end, failures := time.Now().Add(within), 0
	for {
		if connect() == nil {
			failures = 0
		} else if failures++; failures == shutFailures {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(shutPause)
	}
}

// toAPIServer connects to where Kubernetes tells every container that its API server is; nil where it told nothing.
func toAPIServer() func() error {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil
	}
	return func() error {
		connection, err := net.DialTimeout("tcp", net.JoinHostPort(host, port), shutPatience)
		if err == nil {
			connection.Close()
		}
		return err
	}
}
