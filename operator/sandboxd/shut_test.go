package main

import (
	"errors"
	"net"
	"testing"
	"time"
)

func TestAPodWaitsUntilItsNetworkIsShut(t *testing.T) {
	refused := errors.New("refused")
	for name, of := range map[string]struct {
		answers []error
		within  time.Duration
		asked   int
		shut    bool
	}{
		"shut from the start":           {[]error{refused, refused}, time.Minute, 2, true},
		"after a while":                 {[]error{nil, nil, refused, refused}, time.Minute, 4, true},
		"one failure is none":           {[]error{refused, nil, refused, refused}, time.Minute, 4, true},
		"open for good":                 {[]error{nil, nil, nil, nil}, 2*shutPause + shutPause/2, 4, false},
		"no time, but it is asked once": {[]error{nil}, 0, 1, false},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			shut := awaitShut(func() error {
				answer := of.answers[min(asked, len(of.answers)-1)]
				asked++
				return answer
			}, of.within)
			if shut != of.shut || asked > of.asked || of.shut && asked != of.asked {
				t.Errorf("shut %v after %d questions", shut, asked)
			}
		})
	}
}

func TestTheAPIServerIsWhereKubernetesSays(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if toAPIServer() != nil {
		t.Error("there is none to ask")
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	host, port, _ := net.SplitHostPort(listener.Addr().String())
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	connect := toAPIServer()
	if err := connect(); err != nil {
		t.Error(err)
	}
	listener.Close()
	if connect() == nil {
		t.Error("nobody listens")
	}
}
